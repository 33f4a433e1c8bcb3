"""What the build adds to the C code that mypyc generates: docstrings, ConfigError for an argument of a wrong class, spare objects.

mypyc 2.4.1 drops docstrings, and raises TypeError where the class of an argument is not the annotated one. `complete` adds the
docstrings to the C code, and lets `refuse` of arguments.py raise: `help()` and errors are the same on both builds. Where mypyc's
code ends the process, because an integer or a tuple cannot be allocated, it takes a spare one: see spare_objects.h.

Rule: a build fails loudly. mypyc is pinned, another version may write other code: every public docstring must find its place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

MARK: Final = "/* docstrings added */\n"
PRELUDE: Final = """\
/* The argument `name` is not of the expected class: `refuse` of PACKAGE.arguments raises ConfigError. */
__attribute__((cold, noinline, unused)) static void KVCM_ArgumentError(const char *name, PyObject *value, const char *expected) {
    PyObject *arguments = PyImport_ImportModule("PACKAGE.arguments");
    if (arguments == NULL) return;
    PyObject *result = PyObject_CallMethod(arguments, "refuse", "sOs", name, value, expected);
    Py_XDECREF(result);
    Py_DECREF(arguments);
}
/* The docstring of a class that is not native; made once at import, and kept. */
__attribute__((cold, noinline, unused)) static PyObject *KVCM_Text(const char *text) {
    PyObject *made = PyUnicode_FromString(text);
    if (made != NULL) return made;
    PyErr_Clear();
    return Py_None;
}
"""
SPARES: Final = "spare_objects.h"
_STRING: Final = r'(?:NULL|"(?:[^"\\]|\\.)*")'
_SIGNATURE_END: Final = '\\n--\\n\\n"'  # of mypyc's text signature

Key = tuple[str, str, str]  # module, class or "", function or ""


class Docstrings:
    """The docstrings of the modules that are compiled, read from their sources."""

    def __init__(self, root: Path, files: list[str]) -> None:
        self.files: dict[str, str] = {}  # file -> module
        self.texts: dict[Key, str] = {}
        self.signatures: dict[Key, str] = {}  # with the types, as the source writes them
        self.properties: set[Key] = set()
        self.class_at: dict[tuple[str, int], str] = {}  # (file, line of the class statement) -> class
        for file in files:
            module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            self.files[file] = module
            tree = ast.parse((root / file).read_text())
            self._add((module, "", ""), tree)
            for node in tree.body:
                if isinstance(node, ast.FunctionDef):
                    self._add((module, "", node.name), node)
                elif isinstance(node, ast.ClassDef):
                    self._add((module, node.name, ""), node)
                    self.class_at[file, node.lineno] = node.name
                    for member in node.body:
                        if isinstance(member, ast.FunctionDef):
                            self._add((module, node.name, member.name), member)

    def _add(self, key: Key, node: ast.Module | ast.ClassDef | ast.FunctionDef) -> None:
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(each) for each in node.decorator_list]
            if f"{node.name}.setter" in decorators:
                return  # a property shows the docstring of its getter
            if "property" in decorators:
                self.properties.add(key)
            self.signatures[key] = (
                f"{node.name}({', '.join(_parameters(node.args))}) -> {ast.unparse(node.returns or ast.Name('None'))}"
            )
        text = ast.get_docstring(node)
        if text is not None:
            self.texts[key] = text


def _parameters(given: ast.arguments) -> Iterator[str]:
    """Each parameter with its type and default, as a person writes them."""
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    for argument, default in zip(plain, defaults, strict=True):
        yield _parameter(argument, default)
    if given.vararg is not None or given.kwonlyargs:
        yield "*" if given.vararg is None else f"*{_parameter(given.vararg, None)}"
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _parameter(argument, default)


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")


class _Completion:
    """The changes to one file of C code."""

    def __init__(self, code: str, docs: Docstrings, package: str, spares: str) -> None:
        from mypyc.namegen import NameGenerator

        names = NameGenerator([list(docs.files.values())])
        self.code = re.sub(r"\n[ \t]+", "\n", code)  # most of the text is indentation
        self.docs = docs
        self.package = package
        self.spares = spares  # C code for the head of the file
        self.placed: set[Key] = set()
        self.key_of: dict[str, Key] = {}  # C name, as mypyc makes it -> what it is
        for key in [*docs.texts, *docs.signatures]:
            module, owner, name = key
            self.key_of[names.private_name(module, f"{owner}.{name}".strip("."))] = key
            if owner and name:  # a method of a class that is not native is an object of a class of its own
                self.key_of[names.private_name(module, f"{name}_{owner}_obj")] = key

    def run(self) -> str:
        self._functions()
        self._classes()
        self._other_classes()
        self._properties()
        self._modules()
        self._arguments()
        self._tuples()
        head, line, rest = self.code.partition('#include "__native_internal_')
        if not line:
            raise RuntimeError("the C code does not include its own header")
        include, _, rest = rest.partition("\n")
        return f"{MARK}{self.spares}{head}{line}{include}\n{PRELUDE.replace('PACKAGE', self.package)}{rest}"

    def _replace(self, pattern: str, change: Callable[[re.Match[str]], str]) -> None:
        self.code = re.sub(pattern, change, self.code, flags=re.MULTILINE | re.DOTALL)

    def _text(self, key: Key, kept: str = "NULL") -> str | None:
        """The C string of a docstring, after mypyc's text signature if there is one, and the signature with its types."""
        if key not in self.docs.texts:
            return None
        self.placed.add(key)
        text = self.docs.texts[key]
        if kept == "NULL":
            return _c_string(text)
        if not kept.endswith(_SIGNATURE_END):
            raise RuntimeError(f"not the text signature that was expected: {kept}")
        if key in self.docs.signatures:
            text = f"{self.docs.signatures[key]}\n\n{text}"
        return kept[:-1] + _c_string(text)[1:]

    def _functions(self) -> None:
        def change(match: re.Match[str]) -> str:
            text = self._text(self.key_of.get(match[2], ("", "", "")), match[3])
            return match[0] if text is None else f"{match[1]}{text})"

        self._replace(rf"(\(PyCFunction\)CPyPy_(\w+),\s*METH[A-Z_ |]*,\s*PyDoc_STR\()({_STRING})\)", change)

    def _classes(self) -> None:
        def change(match: re.Match[str]) -> str:
            key = self.key_of.get(match[2], ("", "", ""))
            text = self._text(key, "NULL" if key[2] else match[3])
            return match[0] if text is None else f"{match[1]}{text})"

        self._replace(rf"(CPyType_(\w+)_template_ = \{{[^}}]*?\.tp_doc = PyDoc_STR\()({_STRING})\)", change)

    def _other_classes(self) -> None:
        """Those that are not native: mypyc gives them all the same docstring, in code that names the file and the line."""

        def change(match: re.Match[str]) -> str:
            owner = self.docs.class_at.get((match[3], int(match[4])), "")
            text = self._text((self.docs.files.get(match[3], ""), owner, ""))
            return match[0] if text is None else f"KVCM_Text({text});{match[2]}"

        traceback = r'CPy_AddTraceback\("([^"]*)", "<module>", (\d+),'
        self._replace(rf"(CPyStatics\[\d+\]; /\* 'mypyc filler docstring' \*/)(.*?{traceback})", change)

    def _properties(self) -> None:
        def change(table: re.Match[str]) -> str:
            def change_one(match: re.Match[str]) -> str:
                module, owner, _ = self.key_of.get(table[1], ("", "", ""))
                key = (module, owner, match[2])
                text = self._text(key) if key in self.docs.properties else None
                return match[0] if text is None else f"{match[1]}PyDoc_STR({text}), NULL}}"

            entry = r'(\{"(\w+)",\s*\(getter\)\w+,\s*(?:\(setter\)\w+|NULL),\s*)NULL,\s*NULL\}'
            return re.sub(entry, change_one, table[0])

        self._replace(r"^static PyGetSetDef (\w+)_getseters\[\] = \{.*?^\};", change)

    def _modules(self) -> None:
        def change(match: re.Match[str]) -> str:
            text = self._text((match[2], "", ""))
            return match[0] if text is None else f"{match[1]}PyDoc_STR({text}), /* docstring */"

        self._replace(r'("([\w.]+)",\s*)NULL, /\* docstring \*/', change)

    def _tuples(self) -> None:
        """A tuple that cannot be allocated ends the process, after a spare one could not be had either."""
        made = r"PyTuple_New(\(\d+\);\nif \(unlikely\(\w+ == NULL\)\)\nCPyError_OutOfMemory\(\))"
        self.code, count = re.subn(made, r"KVCM_Tuple\1", self.code)
        if count == 0:
            raise RuntimeError("the C code makes no tuple")

    def _arguments(self) -> None:
        """Where a wrapper that Python calls finds an argument of a wrong class, or the setter of a property."""
        before = self.code
        self._replace(
            r'CPy_TypeError\(("[^"]*"), obj_(?!self\))(\w+)\)', lambda match: _error(match[2], f"obj_{match[2]}", match[1])
        )
        if self.code == before:
            raise RuntimeError("the C code checks no argument")

        def change(setter: re.Match[str]) -> str:
            return re.sub(r'CPy_TypeError\(("[^"]*"), value\)', lambda error: _error(setter[1], "value", error[1]), setter[0])

        # a field's setter has another form: assigning to a field raises TypeError
        self._replace(r"^\w+_set_(\w+)\(\w+ \*self, PyObject \*value, void \*closure\)\n\{\n\w+ retval = .*?^return 0;", change)


def _error(name: str, variable: str, expected: str) -> str:
    return f'KVCM_ArgumentError("{name}", {variable}, {expected})'


def _c_string(text: str) -> str:
    from mypyc.codegen.cstring import c_string_initializer

    return c_string_initializer(text.encode())


def public(key: Key) -> bool:
    return not any(part.startswith("_") for name in key for part in name.split("."))


def complete(source: Path, root: Path, files: list[str], package: str) -> None:
    """Change the C code in place. Does nothing to code that was changed before. Raises RuntimeError if a docstring has no place."""
    code = source.read_text()
    if code.startswith(MARK):
        return
    work = _Completion(code, Docstrings(root, files), package, (root / SPARES).read_text())
    changed = work.run()
    missing = sorted(".".join(filter(None, key)) for key in work.docs.texts if public(key) and key not in work.placed)
    if missing:
        raise RuntimeError(f"no place in the C code for the docstrings of: {', '.join(missing)}")
    source.write_text(changed)
