"""Cuts of language models: what a client trains is the whole model without what it did not select.

Needs the extra `llm`; models are tiny and have random weights.
"""

import pickle

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import CutError, InputError
from keyhole.identity import identity_of

WHY = "needs torch==2.13.0 and the extra llm: pip install transformers peft safetensors"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)
peft = pytest.importorskip("peft", reason=WHY)
safetensors = pytest.importorskip("safetensors.torch", reason=WHY)

pytestmark = pytest.mark.filterwarnings(  # peft reads it of transformers
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
VOCAB, LAYERS, RANK, EXPERTS, WIDTH = 30, 2, 4, 4, 24
STEPS = kh.ClientUpdate(client_lr=0.5, batch_size=3, epochs=2)


def make_llama(**more):
    torch.manual_seed(more.pop("seed", 0))
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        **more,
    )
    return transformers.LlamaForCausalLM(config)


def make_mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        initializer_range=0.3,
    )
    return transformers.MixtralForCausalLM(config)


def make_gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=16,
        n_inner=WIDTH,
        n_layer=LAYERS,
        n_head=2,
        n_positions=16,
        initializer_range=0.3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def with_lora(base, seed=1):
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"])
    adapted = peft.get_peft_model(base, config)
    for name, p in adapted.named_parameters():
        if "lora_B" in name:  # zero at first: what is absent would not show
            torch.nn.init.normal_(p, std=0.3)
    return adapted


def forward(net, batch):
    return net(input_ids=batch["ids"]).logits


def loss(logits, batch):
    wanted = batch["ids"][:, 1:]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten())


def client(words=VOCAB, seed=3):
    return {"ids": np.random.default_rng(seed).integers(words, size=(7, 6))}


def update_of(model, keys, data):
    slices = model.layout.select(model.init(0), keys)
    train = model.trainer(STEPS).for_keys({keys.space.name: keys})
    return slices, train(slices, data, np.random.default_rng(0)).update


def by_hand(whole, data, trained, logits=forward):
    """Plain SGD on some tensors of a whole module, in the order that clients meet examples."""
    for name, p in whole.named_parameters():
        p.requires_grad_(name in trained)
    parameters = [p for p in whole.parameters() if p.requires_grad]
    before = {n: p.detach().clone() for n, p in whole.named_parameters() if p.requires_grad}
    sgd = torch.optim.SGD(parameters, STEPS.client_lr)
    rng, ids = np.random.default_rng(0), torch.from_numpy(data["ids"])
    for order in [rng.permutation(len(ids)) for _ in range(STEPS.epochs)]:
        for start in range(0, len(ids), STEPS.batch_size):
            batch = {"ids": ids[order[start : start + STEPS.batch_size]]}
            sgd.zero_grad()
            loss(logits(whole, batch), batch).backward()
            sgd.step()
    return {n: b - whole.get_parameter(n).detach() for n, b in before.items()}


def stacked(model, changes):
    """Changes of a whole module's tensors, as the model's parameters are stacked."""
    found = {}
    for stacks in model.make_net.stacks:
        for stack in stacks.each:
            own = [changes[names[0]].movedim(stack.axis, 0) for _, names in stack.layers]
            found[stack.path] = torch.cat(own).numpy()
    return found


def names_of(model):
    return {
        names[0] for s in model.make_net.stacks for stack in s.each for _, names in stack.layers
    }


def cut_away(model, keys):
    """A whole module in which what was not selected is zero."""
    params = model.init(0)
    for value in params.values():
        value[np.setdiff1d(np.arange(len(value)), keys.array)] = 0
    return kh.torch.whole_module(model, params)


CUTS = {
    "lora": (lambda: with_lora(make_llama()), kh.torch.lora_cut, LAYERS * RANK),
    "neurons of Llama": (make_llama, kh.torch.neuron_cut, LAYERS * WIDTH),
    "neurons of GPT-2": (make_gpt2, kh.torch.neuron_cut, LAYERS * WIDTH),
}
SOME = [[0.1, 0.2, 0.6], [0.9, 0, 0.5], [0.8]]  # both layers, in no order, none of one


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize("chosen", [*SOME, None], ids=str)
def test_what_is_not_selected_is_absent(kind, chosen):
    make, cut, count = CUTS[kind]
    model = kh.torch.from_module(make(), loss, [cut(make())], forward=forward)
    (space,) = model.layout.spaces
    assert space.num_keys == count
    keys = space.all_keys() if chosen is None else space.keys([int(count * at) for at in chosen])
    _, update = update_of(model, keys, client())
    whole = make() if chosen is None else cut_away(model, keys)
    expected = stacked(model, by_hand(whole, client(), names_of(model)))
    assert update.keys() == expected.keys()
    for name, value in update.items():
        assert value.any()
        np.testing.assert_allclose(value, expected[name][keys.array], atol=1e-5)


def masked_experts(chosen):
    """A whole mixture whose routers do not see experts that were not selected."""
    whole = make_mixtral()
    for number, layer in enumerate(whole.model.layers):
        here = [k % EXPERTS for k in chosen if k // EXPERTS == number]
        hidden = torch.full((EXPERTS,), -torch.inf)
        hidden[here] = 0
        router = layer.mlp.gate
        router.top_k = min(router.top_k, len(here))

        def route(states, router=router, hidden=hidden):
            logits = states @ router.weight.T + hidden
            top = torch.topk(logits.softmax(-1), router.top_k, dim=-1)
            return logits, top.values / top.values.sum(-1, keepdim=True), top.indices

        router.forward = route
        if not here:
            layer.mlp.forward = torch.zeros_like
    return whole


@pytest.mark.parametrize("chosen", [range(8), [0, 2, 3, 5, 6], [6, 1, 0, 7], [2, 4, 7], [5, 6]])
def test_routers_choose_among_the_experts_that_are_there(chosen):
    cut = kh.torch.expert_cut(make_mixtral())
    model = kh.torch.from_module(make_mixtral(), loss, [cut], forward=forward)
    keys = model.layout.spaces[0].keys(list(chosen))
    _, update = update_of(model, keys, client())
    whole = masked_experts(list(chosen))
    expected = stacked(model, by_hand(whole, client(), names_of(model)))
    assert {name.rpartition(".")[2] for name in update} == {"gate_up_proj", "down_proj", "weight"}
    for name, value in update.items():
        np.testing.assert_allclose(value, expected[name][keys.array], atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [make_llama, make_gpt2, lambda: make_llama(tie_word_embeddings=True, pad_token_id=9)],
    ids=["two tables", "one table", "one table, padded"],
)
def test_words_are_rows_of_embedding_and_head(make):
    cut = kh.torch.vocabulary_cut(make())
    model = kh.torch.from_module(make(), loss, [cut], forward=forward)
    is_tied = make().config.tie_word_embeddings
    assert model.layout.client_size(word=5) == 5 * 16 * (1 if is_tied else 2)
    keys = model.layout.spaces[0].keys([4, 9, 28, 2, 17])
    _, update = update_of(model, keys, client(words=5))
    words = torch.tensor(list(keys))

    def over_own(net, batch):
        return net(input_ids=words[batch["ids"]]).logits[..., words]

    whole = make()
    expected = stacked(model, by_hand(whole, client(words=5), names_of(model), over_own))
    for name, value in update.items():
        np.testing.assert_allclose(value, expected[name][keys.array], atol=1e-5)


def test_the_frozen_base_is_neither_sent_nor_copied_nor_changed():
    base = make_llama()
    adapted = with_lora(base)
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    model = kh.torch.from_module(adapted, loss, [kh.torch.lora_cut(adapted)], forward=forward)
    assert all(name.startswith("stacked.") for name in model.init(0))
    assert model.layout.server_size == LAYERS * RANK * 2 * (16 + 16)
    nets = [model.make({"rank": count}).module for count in (3, 8)]
    at = "base_model.model.model.embed_tokens.weight"
    memory = {net.get_parameter(at).data_ptr() for net in (adapted, *nets)}
    assert len(memory) == 1
    update_of(model, model.layout.spaces[0].keys([1, 6]), client())
    assert all(torch.equal(before[n], p) for n, p in adapted.named_parameters())
    assert all(p.requires_grad == ("lora" in n) for n, p in adapted.named_parameters())


def mean_loss(outputs, examples):
    return float(loss(torch.from_numpy(outputs), {"ids": torch.from_numpy(examples["ids"])}))


def make_task():
    adapted = with_lora(make_mixtral())
    cuts = [kh.torch.lora_cut(adapted), kh.torch.expert_cut(adapted)]
    model = kh.torch.from_module(adapted, loss, cuts, forward=forward)
    rng = np.random.default_rng(0)
    ids = {f"client {n}": {"ids": rng.integers(VOCAB, size=(4, 6))} for n in range(8)}
    data = kh.data.from_dict(ids).hold_out(0.25)
    return kh.Task(model, data, keys=kh.keys.independent, metrics={"loss": mean_loss})


SETTINGS = {"cohort": 4, "client_lr": 0.1, "progress": False}


def test_a_run_selects_ranks_and_experts_and_is_resumed(tmp_path):
    m = {"rank": 3, "expert": 5}
    run = kh.train(make_task(), rounds=2, m=m, out=tmp_path / "run", **SETTINGS)
    layout = make_task().model.layout
    own = layout.client_bytes(**m) + 2 * 8 * (3 + 5)  # keys are named with both
    assert {*run.trials[0].records[0].bytes_up} == {own}
    more = kh.train(make_task(), rounds=3, m=m, out=tmp_path / "run", **SETTINGS)
    whole = kh.train(make_task(), rounds=3, m=m, **SETTINGS)
    assert all(np.array_equal(a, whole.model()[n]) for n, a in more.model().items())


def test_what_was_trained_is_read_again_and_by_peft(tmp_path):
    adapted = with_lora(make_mixtral())
    cuts = [kh.torch.lora_cut(adapted), kh.torch.expert_cut(adapted)]
    model = kh.torch.from_module(
        adapted, loss, cuts, forward=forward, trained=["*.model.norm.weight"]
    )
    rng = np.random.default_rng(0)
    params = {n: (a + rng.normal(size=a.shape)).astype("f4") for n, a in model.init(0).items()}
    assert sum(not name.startswith("stacked.") for name in params) == 1
    kh.torch.save_trained(model, params, tmp_path / "run")
    again = kh.torch.load_trained(model, tmp_path / "run")
    assert params.keys() == again.keys()
    assert all(np.array_equal(a, again[name]) for name, a in params.items())
    base = make_mixtral()
    others = safetensors.load_file(tmp_path / "run" / "trained.safetensors")
    assert not base.load_state_dict(others, strict=False).unexpected_keys
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "run")
    batch = {"ids": torch.from_numpy(client()["ids"])}
    expected = model.predict(params, client())
    with torch.no_grad():
        np.testing.assert_allclose(forward(loaded, batch), expected, atol=1e-5)
        whole = kh.torch.whole_module(model, params)
        np.testing.assert_allclose(forward(whole, batch), expected, atol=1e-5)
    assert type(whole) is type(adapted)


def test_an_adapter_of_another_base_is_refused(tmp_path):
    def model_of(base):
        adapted = with_lora(base)
        return kh.torch.from_module(adapted, loss, [kh.torch.lora_cut(adapted)])

    ours = model_of(make_llama())
    kh.torch.save_trained(ours, ours.init(0), tmp_path)
    with pytest.raises(InputError, match=r"belongs to another base: got base \w{16}; expected"):
        kh.torch.load_trained(model_of(make_llama(seed=5)), tmp_path)
    ours.make_net.whole.save_pretrained(tmp_path)  # as peft writes it
    with pytest.raises(InputError, match=r"got base none; .* or pass any_base=True"):
        kh.torch.load_trained(ours, tmp_path)
    again = kh.torch.load_trained(ours, tmp_path, any_base=True)
    assert all(np.array_equal(a, again[name]) for name, a in ours.init(0).items())
    with pytest.raises(InputError, match="there is no file of trained tensors"):
        kh.torch.load_trained(ours, tmp_path / "nowhere")


def test_a_model_can_be_sent_to_another_process():
    adapted = with_lora(make_llama())
    model = kh.torch.from_module(adapted, loss, [kh.torch.lora_cut(adapted)], forward=forward)
    keys = model.layout.spaces[0].keys([1, 6])
    (_, ours), (_, theirs) = (
        update_of(each, keys, client()) for each in (model, pickle.loads(pickle.dumps(model)))
    )
    assert all(np.array_equal(value, theirs[name]) for name, value in ours.items())


def test_another_base_is_another_task():
    def identity(seed):
        adapted = with_lora(make_llama(seed=seed))
        model = kh.torch.from_module(adapted, loss, [kh.torch.lora_cut(adapted)])
        return identity_of(model)

    assert identity(0) == identity(0) != identity(5)


def uneven():
    net = torch.nn.Module()
    net.layers = torch.nn.ModuleList([torch.nn.Linear(3, 4), torch.nn.Linear(3, 5)])
    net.tied = torch.nn.Linear(4, 4, bias=False)
    net.also = torch.nn.Linear(4, 4, bias=False)
    net.also.weight = net.tied.weight
    return net


def cut_of(*axes):
    cuts = [kh.torch.LayerCut(f"unit{n}", each) for n, each in enumerate(axes)]
    return kh.torch.from_module(uneven(), loss, cuts)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: cut_of({"layer.{layer}.weight": 0}), "names a tensor that the module does not"),
        (lambda: cut_of({"layers.{layer}.weight": 0}), r"got layers.weight \(4, 3\), layers.wei"),
        (lambda: cut_of({"tied.weight": 3}), "do not fit together"),
        (lambda: cut_of({"tied.weight": 0, "also.weight": 1}), "are one tensor and are cut"),
        (lambda: cut_of({"tied.weight": 0}, {"also.weight": 0}), "two cuts name one tensor"),
        (lambda: kh.torch.vocabulary_cut(uneven()), "nothing to cut by word"),
        (lambda: kh.torch.lora_cut(uneven()), "nothing to cut by rank"),
        (lambda: kh.torch.expert_cut(uneven()), "nothing to cut by expert"),
        (lambda: kh.torch.neuron_cut(uneven()), "nothing to cut by neuron"),
        (
            lambda: kh.torch.from_module(uneven(), loss, [], trained=["tide.*"]),
            "trained names no tensor",
        ),
    ],
)
def test_a_cut_that_does_not_fit_is_named(make, said):
    with pytest.raises(CutError, match=said):
        make()


def test_slices_without_their_keys_are_refused():
    model = kh.torch.from_module(make_llama(), loss, [kh.torch.neuron_cut(make_llama())])
    slices = model.layout.select(model.init(0), model.layout.spaces[0].keys([1, 30]))
    with pytest.raises(InputError, match="must be told its keys: got none beside 2 of 'neuron'"):
        model.trainer(STEPS)(slices, client(), np.random.default_rng(0))
