/* Spare integers and tuples for the C code that mypyc generates.

   Where that code cannot allocate an integer object or a tuple, it ends the process, because it has no way to report the error
   there. The functions below take an object that was made beforehand instead. What is short of memory then fails at the next object
   of another kind, which raises MemoryError. Spare objects are replaced once there is memory again. */

#include <Python.h>
#if PY_VERSION_HEX < 0x030B0000
#include "longintrepr.h"
#else
#include "cpython/longintrepr.h"
#endif

#define KVCM_SPARES 4096          /* integers; and tuples, a quarter of it of each length */
#define KVCM_LENGTHS 10           /* longer tuples have no spares */
#define KVCM_AT_ONCE 8            /* objects that one call replaces */
#define KVCM_WIDE (1L << 60)      /* an integer with as many digits as any that fits in a long */

static PyObject *KVCM_integers[KVCM_SPARES];
static PyObject *KVCM_tuples[KVCM_LENGTHS][KVCM_SPARES / 4];
static int KVCM_num_integers = 0;
static int KVCM_num_tuples[KVCM_LENGTHS] = {0};
static int KVCM_missing = KVCM_SPARES; /* of all kinds, so that one comparison is enough; an upper bound */

__attribute__((cold, noinline)) static void KVCM_replace(void) {
    int left = KVCM_AT_ONCE;
    while (left > 0 && KVCM_num_integers < KVCM_SPARES) {
        PyObject *made = PyLong_FromLong(KVCM_WIDE);
        if (made == NULL) goto none;
        KVCM_integers[KVCM_num_integers++] = made;
        left--;
    }
    for (int length = 1; length < KVCM_LENGTHS; length++) {
        while (left > 0 && KVCM_num_tuples[length] < KVCM_SPARES / 4) {
            PyObject *made = PyTuple_New(length);
            if (made == NULL) goto none;
            PyObject_GC_UnTrack(made); /* the collector does not visit spares */
            KVCM_tuples[length][KVCM_num_tuples[length]++] = made;
            left--;
        }
    }
    KVCM_missing = left == 0;
    return;
none:
    PyErr_Clear();
}

/* Give a spare integer its value. */
static PyObject *KVCM_spare_integer(long value) {
#if PyLong_SHIFT == 30 && LONG_MAX > 0x7fffffffL
    if (KVCM_num_integers > 0) {
        PyObject *spare = KVCM_integers[--KVCM_num_integers];
        unsigned long rest = value < 0 ? 0UL - (unsigned long)value : (unsigned long)value;
        Py_ssize_t count = 0;
#if PY_VERSION_HEX < 0x030C0000
        digit *digits = ((PyLongObject *)spare)->ob_digit;
#else
        digit *digits = ((PyLongObject *)spare)->long_value.ob_digit;
#endif
        for (; rest != 0; rest >>= PyLong_SHIFT) digits[count++] = (digit)(rest & PyLong_MASK);
#if PY_VERSION_HEX < 0x030C0000
        Py_SET_SIZE(spare, value < 0 ? -count : count);
#else
        ((PyLongObject *)spare)->long_value.lv_tag = ((uintptr_t)count << 3) | (value < 0 ? 2 : 0);
#endif
        KVCM_missing = 1;
        PyErr_Clear();
        return spare;
    }
#endif
    return NULL;
}

static PyObject *KVCM_spare_tuple(Py_ssize_t length) {
    if (length >= KVCM_LENGTHS || KVCM_num_tuples[length] == 0) return NULL;
    PyObject *spare = KVCM_tuples[length][--KVCM_num_tuples[length]];
    PyObject_GC_Track(spare);
    KVCM_missing = 1;
    PyErr_Clear();
    return spare;
}

static inline PyObject *KVCM_Integer(long value) {
    PyObject *made = PyLong_FromLong(value);
    if (__builtin_expect(made == NULL, 0)) return KVCM_spare_integer(value);
    if (__builtin_expect(KVCM_missing, 0)) KVCM_replace();
    return made;
}

static inline PyObject *KVCM_Tuple(Py_ssize_t length) {
    PyObject *made = PyTuple_New(length);
    return __builtin_expect(made == NULL, 0) ? KVCM_spare_tuple(length) : made;
}

#define PyLong_FromLong(value) KVCM_Integer(value)
