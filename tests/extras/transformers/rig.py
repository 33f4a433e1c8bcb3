"""A store and transformers' own cache side by side: each pass runs over both, and every logit must be equal to the bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import DynamicCache, PreTrainedModel

from kv_cache_manager_v2 import EmulatedDriver, KVCache, slots_to_write
from kv_cache_manager_v2.extras.transformers import PagedCache, PagedStore

MIB = 1 << 20


class Pair:
    """One sequence, or a batch of equally long ones, in both caches."""

    def __init__(self, store: PagedStore, prompt: torch.Tensor, own: DynamicCache | None = None) -> None:
        self.model = store.model
        self.one_by_one = store.one_by_one
        self.paged = store.open(prompt, reuse=own is not None)
        self.own = DynamicCache(config=self.model.config) if own is None else own
        assert self.paged.get_seq_length() == self.own.get_seq_length(), "another prefix was found"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """One pass over both, or one for each token where the model needs that. Returns the most likely next tokens, (rows, 1)."""
        for part in ids.split(1 if self.one_by_one and self.own.get_seq_length() > 0 else ids.shape[1], dim=1):
            logits = compute(self.model, part, self.paged)
            assert torch.equal(logits, compute(self.model, part, self.own)), "logits differ"
        return logits[:, -1:].argmax(-1)

    def decode(self, token: torch.Tensor, count: int) -> torch.Tensor:
        """Greedy steps; the tokens that were passed and the last one that came out, of shape (rows, count + 1)."""
        tokens = [token]
        for _step in range(count):
            tokens.append(self.forward(tokens[-1]))
        return torch.cat(tokens, dim=1)

    def copy_of_own(self) -> DynamicCache:
        """What transformers' own cache holds now."""
        return copy.deepcopy(self.own)


def compute(model: PreTrainedModel, ids: torch.Tensor, cache: PagedCache | DynamicCache) -> torch.Tensor:
    """The logits of one pass."""
    with torch.no_grad():
        return model(input_ids=ids, cache=cache).logits


@contextmanager
def open_store(
    model: PreTrainedModel,
    schedule: str = "eager",
    disk: tuple[str, int] | None = None,
    gpu_bytes: int = MIB,
    host_bytes: int = MIB,
) -> Iterator[PagedStore]:
    """A store with little memory, by default the least that it can have on the GPU. At the end its structures are checked."""
    driver = EmulatedDriver(schedule, seed=3)
    with PagedStore(model, gpu_bytes=gpu_bytes, host_bytes=host_bytes, disk=disk, tokens_per_block=32, driver=driver) as store:
        yield store
        for cache in list(store.caches):
            cache.close()
        store.manager.check_invariants()
    driver.close()


def spoil_gpu(store: PagedStore) -> None:
    """Have as many pages of the GPU taken as there are, while no cache of the store is active, and fill them with NaN."""
    manager, size = store.manager, store.manager.tokens_per_block
    hogs: list[KVCache] = []
    while True:
        hog = manager.create_kv_cache()
        if not hog.resume(store.stream) or not hog.resize(size):
            hog.close()
            break
        hogs.append(hog)
    store.driver.order(store.stream)
    for layer in store.buffers:
        for buffer in layer.attention:
            written = slots_to_write(hogs, buffer.addressing[0], converter=buffer.converter)
            buffer.memory[torch.tensor(written.slots)] = torch.nan
        for _plan, buffer in layer.states:
            pages = buffer.converter([hog.get_ssm_block_base_index(buffer.addressing[0]) for hog in hogs])
            buffer.memory[torch.tensor(pages)] = torch.nan
    for hog in hogs:
        hog.close()
