"""Models of Transformers in a checkpoint, exported as a directory that Transformers loads."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import holdfast
from holdfast.checkpoint.export import export
from holdfast.store import open_store

CONFIGS = {
    "gpt2": lambda: GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2),
    "llama": lambda: LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    ),
}  # fmt: skip
MODELS = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}


@pytest.mark.parametrize("shard_bytes", [None, 4000])
@pytest.mark.parametrize("kind", CONFIGS)
def test_an_exported_model_has_equal_logits(tmp_path, kind, shard_bytes):
    torch.manual_seed(0)
    model = MODELS[kind](CONFIGS[kind]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 64, (2, 16))
    with holdfast.Session("job", store=tmp_path / "store", model=model, optimizer=optimizer) as session:
        for _ in range(3):
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    model.config.save_pretrained(tmp_path / "config")
    store, target = open_store(str(tmp_path / "store")), tmp_path / "exported"
    newest = store.checkpoints("job")[-1]
    export(store, "job", newest, target, "hf", config=tmp_path / "config", shard_bytes=shard_bytes)
    if shard_bytes is not None:
        assert (
            len(set(json.loads((target / "model.safetensors.index.json").read_text())["weight_map"].values())) > 2
        )
    loaded = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)
