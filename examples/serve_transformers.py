"""Serves conversations with a hybrid model of transformers whose keys, values and states live in kv_cache_manager_v2's pages.

    python examples/serve_transformers.py [--seed N]

The model is a small Qwen3-Next with random weights; nothing is downloaded. It has linear attention, whose state can be reused where
a snapshot was kept, and full attention. A dozen conversations are open at once and take turns, token by token, on a GPU that holds
a few of them: idle ones are suspended, and their pages move to host memory and disk. Each turn begins with what the turns before
have left. At the end every answer is compared with that of `model.generate` without our cache. Exit status 0 if all are equal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kv_cache_manager_v2.extras.transformers import PagedCache, PagedStore

MIB = 1 << 20
VOCABULARY = 1024
CONVERSATIONS = 12
TURNS = 3
SYSTEM_PROMPT = 100  # tokens with which all conversations begin
QUESTION = 120
ANSWER = 10
TIERS = ("GPU", "host", "disk")


@dataclass
class Conversation:
    """What was said so far, and where each answer lies in it."""

    tokens: list[int]
    answers: list[tuple[int, int]] = field(default_factory=list)


def make_model(seed: int) -> PreTrainedModel:
    """A hybrid model with random weights."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3_next",
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=4096,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def serve_turn(store: PagedStore, conversations: list[Conversation]) -> list[str]:
    """One turn of all conversations, a token of each at a time. Returns what it took, as cells of the table."""
    manager = store.manager
    caches: list[PagedCache] = []
    for conversation in conversations:
        caches.append(store.open(torch.tensor(conversation.tokens)))
        conversation.answers.append((len(conversation.tokens), len(conversation.tokens) + ANSWER))
        prompt = torch.tensor([conversation.tokens])
        stop = caches[-1].prefill_end(prompt.shape[1])
        for end in (stop, prompt.shape[1]):
            begin = caches[-1].get_seq_length()
            if begin < end:
                logits = store.model(input_ids=prompt[:, begin:end], cache=caches[-1]).logits
        conversation.tokens.append(int(logits[0, -1].argmax()))
    for _step in range(ANSWER - 1):
        for conversation, cache in zip(conversations, caches, strict=True):
            logits = store.model(input_ids=torch.tensor([conversation.tokens[-1:]]), cache=cache).logits
            conversation.tokens.append(int(logits[0, -1].argmax()))
    for cache in caches:
        cache.close()
    asked = sum(begin for begin, _end in [conversation.answers[-1] for conversation in conversations])
    reused = [sum(cache.reused_by_level[0][level] for cache in caches) for level in range(len(TIERS))]
    suspended, _resumed = manager.get_and_reset_iteration_suspend_resume_stats()
    return [f"{number:,}" for number in (asked, *reused, asked - sum(reused), ANSWER * len(caches), suspended)]


def main() -> int:
    """Serve, report, compare; returns the exit status."""
    parser = argparse.ArgumentParser(description="Serve conversations with a hybrid model of transformers from managed pages.")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights and of the conversations")
    seed: int = parser.parse_args().seed
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    model = make_model(seed)
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:
        found: list[int] = torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()
        return found

    system = words(SYSTEM_PROMPT)
    conversations = [Conversation(list(system)) for _number in range(CONVERSATIONS)]
    started = time.perf_counter()
    row = "{:>4} {:>14} {:>12} {:>12} {:>12} {:>10} {:>10} {:>12}"
    print(row.format("turn", "prompt tokens", *[f"from {tier}" for tier in TIERS], "computed", "generated", "suspensions"))
    with (
        tempfile.TemporaryDirectory() as directory,
        PagedStore(model, gpu_bytes=6 * MIB, host_bytes=MIB, disk=(directory, 64 * MIB)) as store,
    ):
        for turn in range(TURNS):
            for conversation in conversations:
                conversation.tokens += words(QUESTION)
            print(row.format(turn + 1, *serve_turn(store, conversations)))
    served = time.perf_counter()
    equal = 0
    for conversation in conversations:
        for begin, end in conversation.answers:
            prompt = torch.tensor([conversation.tokens[:begin]])
            expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER, do_sample=False)
            equal += expected[0, begin:].tolist() == conversation.tokens[begin:end]
    answers = CONVERSATIONS * TURNS
    print(f"served in {served - started:.1f} s, compared in {time.perf_counter() - served:.1f} s")
    print(f"{equal} of {answers} answers are equal, token by token, to those of model.generate without our cache")
    if equal < answers:
        print("WRONG: answers differ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
