"""Which inputs of a model a paged cache accepts: pages are found by token ids alone, so nothing else may change what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from kv_cache_manager_v2.arguments import instance, shown
from kv_cache_manager_v2.errors import ConfigError

_OTHER: Final = (
    *("pixel_", "image_", "video_", "audio_", "input_features", "input_values", "mm_"),  # of other modalities
    *("cu_seq", "seq_idx", "max_length_q", "max_length_k"),  # of several sequences in one row
    "encoder_",
)
_INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def prompt_tensor(value: object, dims: Sequence[int]) -> torch.Tensor:
    """`input_ids`, with one of these numbers of dimensions. Raises ConfigError for anything that is not a batch of prompts."""
    ids = instance(value, torch.Tensor, "input_ids")
    if ids.dim() not in dims or ids.numel() == 0 or ids.dtype not in _INTEGERS:
        allowed = "(rows, columns)" if 1 not in dims else "(rows, columns) or (columns,)"
        raise ConfigError(
            f"input_ids has shape {tuple(ids.shape)} and type {ids.dtype}; it must hold integers, at least one, in shape {allowed}"
        )
    return ids


def left_padding(value: object, ids: torch.Tensor) -> list[int]:
    """The number of padding columns at the left of each row, by an `attention_mask` for `ids`. Raises ConfigError for another."""
    if value is None:
        return [0] * (len(ids) if ids.dim() == 2 else 1)
    mask = instance(value, torch.Tensor, "attention_mask")
    if mask.shape != ids.shape:
        raise ConfigError(f"attention_mask has shape {tuple(mask.shape)}; it must be that of input_ids, {tuple(ids.shape)}")
    real = mask.view(-1, ids.shape[-1]) != 0
    if not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ConfigError("attention_mask has padding that is not on the left, or a row without tokens: pad prompts on the left")
    pads: list[int] = (~real).sum(dim=1).tolist()
    return pads


def require_default(inputs: Mapping[str, object], pads: Sequence[int], begin: int, end: int) -> None:
    """Raise ConfigError unless a pass over columns `begin` to `end` - 1 computes what its tokens and the left padding imply.

    Column c of a row has position c - pad. Positions of padding are not looked at: nothing of it is kept.
    """
    for name, value in inputs.items():
        if value is not None and name.startswith(_OTHER):
            raise ConfigError(f"a paged cache takes no {name}: equal tokens would share pages, whatever it says of them")
    kinds = inputs.get("token_type_ids")
    if kinds is not None and not (isinstance(kinds, torch.Tensor) and not bool(kinds.any())):
        raise ConfigError(f"token_type_ids is {_described(kinds)}; a paged cache takes tokens of type 0 only: leave it out")
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None and not _is_padding(mask, pads, end):
        raise ConfigError(
            f"attention_mask is {_described(mask)}; it must have shape ({len(pads)}, {end}), with 0 only in the first "
            f"{shown(list(pads))} columns of the rows: a paged cache has the padding that open() was told of"
        )
    if positions is not None and not _are_default(positions, pads, begin, end):
        raise ConfigError(
            f"position_ids is {_described(positions)}; a paged cache takes the positions {begin}..{end - 1}, less the padding "
            f"{shown(list(pads))} of the rows: leave position_ids out, or count each row from its first token"
        )


def require_padding_given(inputs: Mapping[str, object], accepted: Sequence[str], pads: Sequence[int]) -> None:
    """Raise ConfigError for a pass over padded rows that does not tell the model so: it would read padding as tokens."""
    for name in ("attention_mask", "position_ids"):
        if name in accepted and inputs.get(name) is None and any(pads):
            raise ConfigError(
                f"a forward pass over rows with the padding {shown(list(pads))} has no {name}: "
                "pass it, as generate() of transformers does"
            )


def _is_padding(mask: object, pads: Sequence[int], end: int) -> bool:
    if not isinstance(mask, torch.Tensor) or mask.shape != (len(pads), end):
        return False
    widest = min(max(pads), end)
    real = torch.arange(widest, device=mask.device) >= torch.tensor(pads, device=mask.device)[:, None]
    return bool(mask[:, widest:].all()) and torch.equal(mask[:, :widest] != 0, real)


def _are_default(positions: object, pads: Sequence[int], begin: int, end: int) -> bool:
    """Whether positions of shape (..., rows or 1, columns) are the default ones, where there may be several for one token."""
    if not isinstance(positions, torch.Tensor) or positions.dim() == 0 or positions.shape[-1] != end - begin:
        return False
    if positions.dim() > 1 and positions.shape[-2] not in (1, len(pads)):
        return False
    columns = torch.arange(begin, end, device=positions.device)
    if not any(pads):
        return bool((positions == columns).all())
    expected = columns - torch.tensor(pads, device=positions.device)[:, None]
    return bool(((positions == expected) | (expected < 0)).all())


def _described(value: object) -> str:
    """The value, with its shape if it is a tensor."""
    return f"{shown(value)} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
