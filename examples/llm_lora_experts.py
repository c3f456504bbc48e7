"""Fine-tuning a mixture of experts by (layer, expert) and LoRA by (layer, rank).

The model is a tiny Mixtral with random weights; people write sequences in one of four dialects.
Chooses the clients' learning rate by the loss of people who are set aside for that, then prints the
loss of others, and the bytes of a client and round, when it takes everything, and when it takes a
part. The frozen base never travels. Needs the extras `torch` and `llm`. `--small` runs it in
seconds.
"""

import sys
from dataclasses import replace

import numpy as np
import peft
import torch
import transformers

import keyhole as kh

IS_SMALL = "--small" in sys.argv
PEOPLE, ROUNDS, RATES = (12, 2, (0.5, 1.5)) if IS_SMALL else (200, 60, (1.5, 4.5, 13.5))
WORDS, LENGTH, DIALECTS = 64, 12, 4


def make_base():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.2,
    )
    return transformers.MixtralForCausalLM(config)


def write(person, rng):
    """Sequences in which the next word follows from the last by the rule of a dialect, mostly."""
    steps = np.where(rng.random((20, LENGTH)) < 0.9, 3 + 10 * (person % DIALECTS), 1)
    return {"ids": (rng.integers(WORDS, size=(20, 1)) + steps.cumsum(axis=1)) % WORDS}


def forward(net, batch):
    return net(input_ids=batch["ids"]).logits


def loss(logits, batch):
    following = batch["ids"][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), following)


def mean_loss(outputs, examples):
    return float(loss(torch.from_numpy(outputs), {"ids": torch.from_numpy(examples["ids"])}))


adapted = peft.get_peft_model(
    make_base(), peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
)
cuts = [kh.torch.lora_cut(adapted), kh.torch.expert_cut(adapted)]
model = kh.torch.from_module(adapted, loss, cuts, forward=forward)

rng = np.random.default_rng(0)
data = kh.data.from_dict({f"person {n}": write(n, rng) for n in range(PEOPLE)}).hold_out(0.1)
tuning = replace(data, splits={"train": data.splits["train"]}).hold_out(0.15, seed=1)
settings: dict = {"rounds": ROUNDS, "cohort": 10, "evaluate_every": ROUNDS, "progress": False}


def train(data, m, rate):
    task = kh.Task(model, data, keys=kh.keys.independent, metrics={"loss": mean_loss})
    return kh.train(task, m=m, mean_over="choosers", client_lr=rate, **settings)


every = {space.name: space.num_keys for space in model.layout.spaces}  # 16 of each
base = sum(p.numel() for name, p in adapted.named_parameters() if "lora" not in name)
print(f"base: {4 * base:,} bytes, with experts; never sent whole")
for m in (every, {"rank": 8, "expert": 8}, {"rank": 4, "expert": 4}):
    losses = {rate: train(tuning, m, rate).metrics["loss"] for rate in RATES}
    rate = min(RATES, key=lambda each: losses[each])
    run = train(data, m, rate)
    down = model.layout.client_bytes(**m)
    print(
        f"{m}: {down:,} bytes down per client and round, loss {run.metrics['loss']:.3f} at rate "
        f"{rate}, of {', '.join(f'{each} ({found:.3f})' for each, found in losses.items())}"
    )
    kh.torch.save_trained(model, run.model(), "llm_lora_experts")  # for peft, and to go on with
