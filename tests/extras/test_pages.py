"""Views of a layer's pages: arrays and tensors over the memory that the manager names."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kv_cache_manager_v2 import KVCacheManager
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.extras.arrays import pool_array
from kv_cache_manager_v2.extras.cuda import CudaDriver
from kv_cache_manager_v2.extras.pages import locate_pages
from kv_cache_manager_v2.ids import GPU_LEVEL, DataRole, LayerId, PageIndexMode
from tests.extras.cuda_standin import StandIn
from tests.support.engine import base_indices
from tests.support.models import attention, model

LAYER = LayerId(3)
KEY = DataRole("key")
PAGES = 10
PAGE_BYTES = 64
OFFSET = 128  # of the layer's buffer in the pool


class OnePool:
    """Stands for a manager with one pool: ten pages of 64 bytes, the layer's first one 128 bytes after the pool's base."""

    def __init__(self, driver: Driver | None = None) -> None:
        self.memory = ctypes.create_string_buffer(bytes(i % 251 for i in range(OFFSET + PAGES * PAGE_BYTES)))
        self.driver: Driver = driver or EmulatedDriver()

    def get_mem_pool_base_address(self, layer_id: LayerId, data_role: DataRole, index_mode: PageIndexMode | None = None) -> int:
        assert (layer_id, data_role) == (LAYER, KEY)
        offset = OFFSET if index_mode is PageIndexMode.SHARED else 0
        return ctypes.addressof(self.memory) + offset

    def get_page_stride(self, layer_id: LayerId, data_role: DataRole) -> int:
        return PAGE_BYTES

    def get_page_index_upper_bound(self, layer_id: LayerId, data_role: DataRole) -> int:
        return PAGES

    def page(self, index: int) -> bytes:
        at = OFFSET + PAGE_BYTES * index
        return self.memory.raw[at : at + PAGE_BYTES]


def test_an_array_shows_page_i_at_base_plus_stride_times_i() -> None:
    """Shape (pages, *page_shape); element [i] is page i, byte for byte."""
    manager = OnePool()
    array = pool_array(manager, LAYER, KEY, np.float16, (2, 4, 4))
    assert array.shape == (PAGES, 2, 4, 4)
    assert array.strides[0] == PAGE_BYTES
    assert all(array[i].tobytes() == manager.page(i) for i in range(PAGES))


def test_an_array_is_no_copy() -> None:
    """Writes go both ways."""
    manager = OnePool()
    array = pool_array(manager, LAYER, KEY, np.int32, (16,))
    array[[2, 7]] = np.arange(32).reshape(2, 16)
    assert manager.page(7) == np.arange(16, 32, dtype=np.int32).tobytes()
    manager.memory[OFFSET] = b"\xff"
    assert array[0].tobytes()[0] == 0xFF


@pytest.mark.parametrize(("dtype", "shape", "made"), [("float32", (8,), 32), ("float16", (64,), 128), ("int8", (8, 9), 72)])
def test_a_shape_of_other_bytes_is_refused_with_the_bytes_expected(dtype: str, shape: tuple[int, ...], made: int) -> None:
    """ConfigError names the page's bytes and what was asked for."""
    with pytest.raises(ConfigError, match=rf"layer 3 'key' has 64 bytes, but page_shape .* of {dtype} makes {made}"):
        pool_array(OnePool(), LAYER, KEY, dtype, shape)


@pytest.mark.parametrize("shape", [(64, 0), (-1, -64), (32.0, 2)])
def test_extents_must_be_positive_ints(shape: Any) -> None:
    """Even if their product happens to fit."""
    with pytest.raises(ConfigError, match="at least 1"):
        pool_array(OnePool(), LAYER, KEY, np.int8, shape)


def test_objects_are_no_bytes() -> None:
    """A dtype that holds references would crash the interpreter."""
    with pytest.raises(ConfigError, match="Python objects"):
        pool_array(OnePool(), LAYER, KEY, object, (8,))


def test_numpy_does_not_look_at_a_gpu() -> None:
    """On a CUDA device the error names the way out."""
    scene = StandIn()
    driver = CudaDriver(bindings=scene.module())
    with pytest.raises(ConfigError, match=r"on CUDA device 0: .*pool_tensor"):
        pool_array(OnePool(driver), LAYER, KEY, np.int8, (64,))
    driver.close()
    scene.close()


def test_pages_can_be_located_without_numpy_or_torch() -> None:
    """The modules below the two adapters need neither; importing the torch adapter is what needs torch."""
    code = (
        "import sys; sys.modules['numpy'] = None; sys.modules['torch'] = None\n"
        "import kv_cache_manager_v2.extras.pages, kv_cache_manager_v2.extras.cuda\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.torch
class TestTensors:
    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    def test_a_tensor_shows_page_i_at_base_plus_stride_times_i(self, torch: Any) -> None:
        """The same pages as the array's, on the CPU, for dtypes that numpy lacks too."""
        from kv_cache_manager_v2.extras.torch import pool_tensor

        manager = OnePool()
        tensor = pool_tensor(manager, LAYER, KEY, torch.bfloat16, (2, 16))
        assert tuple(tensor.shape) == (PAGES, 2, 16)
        assert tensor.device.type == "cpu"
        assert tensor.data_ptr() == ctypes.addressof(manager.memory) + OFFSET
        assert all(bytes(tensor[i].view(torch.uint8).flatten().tolist()) == manager.page(i) for i in range(PAGES))

    def test_a_tensor_is_no_copy(self, torch: Any) -> None:
        """Indexed by page indices, it reads and writes the pages."""
        from kv_cache_manager_v2.extras.torch import pool_tensor

        manager = OnePool()
        tensor = pool_tensor(manager, LAYER, KEY, torch.int32, (4, 4))
        indices = torch.tensor([5, 1])
        tensor[indices] = torch.arange(32, dtype=torch.int32).reshape(2, 4, 4)
        assert manager.page(1) == np.arange(16, 32, dtype=np.int32).tobytes()
        assert torch.equal(tensor[5].flatten(), torch.arange(16, dtype=torch.int32))

    def test_wrong_shapes_and_types_are_refused(self, torch: Any) -> None:
        """With the bytes expected; a numpy dtype is no torch dtype."""
        from kv_cache_manager_v2.extras.torch import pool_tensor

        with pytest.raises(ConfigError, match=r"has 64 bytes, but page_shape \(64,\) of torch.float16 makes 128"):
            pool_tensor(OnePool(), LAYER, KEY, torch.float16, (64,))
        with pytest.raises(ConfigError, match=r"give a torch\.dtype"):
            pool_tensor(OnePool(), LAYER, KEY, "float16", (32,))

    def test_arrays_can_be_had_from_the_torch_adapter(self, torch: Any) -> None:
        """One import for both."""
        from kv_cache_manager_v2.extras import torch as adapter

        assert adapter.pool_array is pool_array
        with pytest.raises(AttributeError, match="no attribute 'pool_list'"):
            adapter.pool_list  # noqa: B018

    def test_device_memory_is_passed_by_the_array_interface(self, torch: Any) -> None:
        """What torch gets to see of a GPU's pages: plain bytes from the layer's base to the pool's end."""
        from kv_cache_manager_v2.extras.torch import CudaBytes

        scene = StandIn()
        driver = CudaDriver(bindings=scene.module())
        manager = OnePool(driver)
        pages = locate_pages(manager, LAYER, KEY, (32,), 2, "float16")
        assert pages.cuda_device == 0
        interface = CudaBytes(pages).__cuda_array_interface__
        assert interface["data"] == (ctypes.addressof(manager.memory) + OFFSET, False)
        assert interface["shape"] == (PAGES * PAGE_BYTES,)
        driver.close()
        scene.close()


class TestRealManager:
    """The same over a manager's own pages, on the emulated device."""

    def test_an_array_is_indexed_by_converted_page_indices(self) -> None:
        """Two layers, one with shorter blocks of its own: what is written through an array lies where the manager says."""
        config = model(
            [attention(0, 4096, 4096), attention(1, 1024, 1024, override=8)], tokens_per_block=32, gpu=2 << 20, max_util=1.0
        )
        driver = EmulatedDriver()
        manager = KVCacheManager(config, driver=driver)
        stream = driver.create_stream()
        cache = manager.create_kv_cache(None, None, 1)
        assert cache.resume(stream)
        assert cache.resize(100)
        driver.synchronize()
        for layer in (LayerId(0), LayerId(1)):
            for role in (DataRole("key"), DataRole("value")):
                size = manager.get_page_stride(layer, role)
                array = pool_array(manager, layer, role, np.float32, (size // 64, 16))
                assert array.shape[0] == manager.get_page_index_upper_bound(layer, role)
                base_pages = base_indices(cache, manager.get_layer_group_id(layer)).tolist()
                pages = manager.get_page_index_converter(layer, role)(base_pages)
                assert len(pages) == cache.num_blocks * (4 if layer == 1 else 1)
                array[pages] = np.arange(len(pages), dtype=np.float32)[:, None, None]
                base = manager.get_mem_pool_base_address(layer, role)
                for number, page in enumerate(pages):
                    assert driver.read_bytes(base + size * page, size) == np.full(size // 4, number, np.float32).tobytes()
        cache.close()
        manager.shutdown()
        driver.destroy_stream(stream)
        driver.close()

    @pytest.mark.torch
    def test_a_tensor_covers_the_same_memory(self) -> None:
        """Tensor and array see each other's writes."""
        torch: Any = pytest.importorskip("torch")
        from kv_cache_manager_v2.extras.torch import pool_tensor

        driver = EmulatedDriver()
        manager = KVCacheManager(model([attention(0, 4096)], tokens_per_block=32, gpu=2 << 20), driver=driver)
        layer, role = LayerId(0), DataRole("key")
        array = pool_array(manager, layer, role, np.uint8, (4096,))
        tensor = pool_tensor(manager, layer, role, torch.float16, (32, 2, 32))
        assert tuple(tensor.shape) == (len(array), 32, 2, 32)
        array[5] = 1
        assert tensor[5].view(torch.uint8).min().item() == 1
        tensor[-1] = 0.5
        assert array[-1].tobytes() == np.full(2048, 0.5, np.float16).tobytes()
        manager.shutdown()
        driver.close()


@pytest.mark.parametrize("end", ["shutdown", "resize", "drop"])
def test_a_view_that_is_out_of_date_can_be_touched(end: str) -> None:
    """Old or empty bytes, never a crash: what it saw stays mapped until the last view is gone."""
    driver = EmulatedDriver()
    manager = KVCacheManager(model([attention(3, 64)], gpu=4 << 20), driver=driver)
    views = [pool_array(manager, LAYER, KEY, np.int32, (16,)), pool_array(manager, LAYER, KEY, np.int32, (16,))]
    views[0][:] = 7
    if end == "shutdown":
        manager.shutdown()
    elif end == "resize":
        assert manager.resize(GPU_LEVEL, 2 << 20)
    else:
        manager.shutdown()
        driver.close()
    part = views[0][3:]
    views.clear()
    assert set(np.unique(part)) <= {0, 7}
    part[:] = 9
    assert (part == 9).all()
    manager.shutdown()
    if end != "drop":
        assert not driver.leaks()
        driver.close()
