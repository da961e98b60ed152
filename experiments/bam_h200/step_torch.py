"""The same model in PyTorch as its users train it: transformers' Llama, torch.compile, autocast, fused AdamW."""

from typing import Any

from bampath.config import Config

COMPILING = 3  # steps until nothing is compiled any more


class Runner:
    """A train step, its state, and the batch that it sees again and again.

    torch.compile needs real tensors on the GPU. Once it is done only parameters and batch stay there until `start`.
    """

    def __init__(self, config: Config) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        m = config.model
        llama = LlamaConfig(
            vocab_size=m.vocab_size,
            hidden_size=m.dim,
            intermediate_size=m.mlp_dim,
            num_hidden_layers=m.layers,
            num_attention_heads=m.heads,
            num_key_value_heads=m.kv_heads,
            head_dim=m.head_dim,
            max_position_embeddings=config.data.sequence_length,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
        model = LlamaForCausalLM(llama).cuda()
        self._torch = torch
        self._model = model
        self._compiled: Any = torch.compile(model)
        o = config.optim
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=o.lr, betas=(o.b1, o.b2), weight_decay=o.weight_decay, fused=True
        )
        self.device = torch.cuda.get_device_name()
        self.parameters = sum(p.numel() for p in model.parameters())
        shape = (config.data.batch_size, config.data.sequence_length)
        self._tokens = torch.randint(0, m.vocab_size, shape, device="cuda")
        self._loss: Any = None
        self.needed: dict[str, int] | None = None  # PyTorch does not know it before it runs
        self.steps(COMPILING)
        self._optimizer.state.clear()
        torch.cuda.empty_cache()
        self.kept: int | None = torch.cuda.memory_reserved()

    def start(self) -> None:
        """Count memory from here; the optimiser makes its state in the first step."""
        self._torch.cuda.reset_peak_memory_stats()

    def steps(self, count: int) -> None:
        """`count` optimiser steps, finished when this returns."""
        torch = self._torch
        for _ in range(count):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self._compiled(input_ids=self._tokens, labels=self._tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._loss = loss.detach()
        torch.cuda.synchronize()

    def loss(self) -> float:
        return float(self._loss)

    def memory(self) -> int:
        """Most bytes that were in use at one time."""
        return int(self._torch.cuda.max_memory_allocated())

    def environment(self) -> dict[str, Any]:
        import transformers

        return {
            "torch": self._torch.__version__,
            "cuda": self._torch.version.cuda,
            "transformers": transformers.__version__,
        }

    def profile(self) -> dict[str, Any]:
        return {}


def build(config: Config) -> Runner:
    return Runner(config)
