"""The stub of `cuda.bindings.driver`, the stand-in for it, and the real package say the same."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.extras.cuda_standin import StandIn
from tests.extras.stub_reader import Stub


def real_bindings() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        pytest.skip(f"cuda-bindings is not installed ({error})")


def test_the_stub_is_read() -> None:
    """The comparisons below compare something."""
    stub = Stub()
    assert len(stub.functions) > 30
    assert stub.enums["CUresult"]["CUDA_SUCCESS"] == 0
    assert stub.structures["CUmemAccessDesc"] == ["location", "flags"]


def test_the_stand_in_has_every_call_of_the_stub_with_its_signature() -> None:
    """Tests against the stand-in test the calls that the stub, hence the type checker, allows."""
    assert Stub().differences(StandIn().module()) == []


def test_the_stand_in_has_no_calls_beyond_the_stub() -> None:
    """What the type checker refuses does not exist in tests either."""
    names = {name for name in dir(StandIn().module()) if name.startswith("cu")}
    assert names == set(Stub().functions)


def test_the_real_package_has_every_call_of_the_stub_with_its_signature() -> None:
    """Names, parameter names, enum values and structure members are the real ones."""
    assert Stub().differences(real_bindings()) == []


@pytest.mark.parametrize("which", ["stand-in", "real"])
def test_argument_types_that_are_refused(which: str) -> None:
    """What the real package refuses with a TypeError before it calls the driver, the stand-in refuses too."""
    scene = StandIn(library=True)
    api = scene.module() if which == "stand-in" else real_bindings()
    pointer, attributes = api.CUdeviceptr(4096), api.CUmemcpyAttributes()
    scene.module().cuInit(0)
    scene.retained[0] = 1
    scene.module().cuCtxPushCurrent(0xC0000)
    with pytest.raises(TypeError):
        api.cuMemcpyBatchAsync([4096], [pointer], [1], 1, [attributes], [0], 1, 0)  # pointers must be objects
    with pytest.raises(TypeError):
        api.cuMemcpyBatchAsync([pointer], [pointer], [1], 1, attributes, [0], 1, 0)  # attributes must be a list
    with pytest.raises(TypeError):
        api.cuMemcpyBatchAsync([pointer], [pointer], ["1"], 1, [attributes], [0], 1, 0)
    with pytest.raises(RuntimeError):
        api.cuMemcpyBatchAsync([pointer], [pointer], [1], 2, [attributes], [0], 1, 0)  # lists shorter than the count
    with pytest.raises(TypeError):
        api.cuMemSetAccess(4096, 4096, api.CUmemAccessDesc(), 1)  # descriptors must be a list
    with pytest.raises(TypeError):
        api.cuMemcpyAsync("4096", 4096, 1, 0)
    with pytest.raises(TypeError):
        api.cuLaunchHostFunc(0, lambda: None, 0)  # a C address, not a callable
    with pytest.raises(OverflowError):
        api.cuMemcpyAsync(4096, 4096, -1, 0)


def test_structures_keep_what_is_set_in_their_parts() -> None:
    """Nested structures are views: what is set through them stays set (the driver relies on it)."""
    api = real_bindings()
    properties = api.CUmemAllocationProp()
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 3
    properties.allocFlags.gpuDirectRDMACapable = 1
    assert int(properties.location.type) == 1
    assert properties.location.id == 3
    assert properties.allocFlags.gpuDirectRDMACapable == 1


def test_without_a_driver_library_the_real_package_raises() -> None:
    """Initialising is where a missing library shows: an exception or a result, and both are converted at one place."""
    api = real_bindings()
    try:
        result = api.cuInit(0)
    except RuntimeError:
        return
    assert isinstance(result, tuple)
    assert isinstance(result[0], api.CUresult)
