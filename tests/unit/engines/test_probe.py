"""What a server says of itself, and each defect by its own message."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lit_rl.engines.base import EngineNeeds
from lit_rl.engines.probe import ServerFacts, ServerNeeds, probe, require_usable, server_defects, wait_for_server
from lit_rl.engines.vllm_server import VLLMServer
from lit_rl.errors import ServerUnreachable, SettingsError
from lit_rl.sync.gloo import GlooTransport
from lit_rl.sync.nccl import NCCLTransport
from tests.fakes.server import FakeServer

GOOD = ServerFacts(
    url="http://s",
    version="0.32.0",
    model_names=("policy",),
    model="/models/SmolLM2",
    max_model_len=100,
    generate_route=True,
    dev_mode=True,
    dtype="float32",
    device="cpu",
    logprobs_mode="processed_logprobs",
    max_logprobs=8,
    weight_transfer_backend="gloo",
)
NEEDS = ServerNeeds(model="SmolLM2", max_logprobs=8, dtype="float32", tokens=100)


def test_a_fitting_server_has_no_defect() -> None:
    assert server_defects(GOOD, NEEDS) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"model": "/models/Qwen3"}, "it serves policy (from /models/Qwen3), the trainer trains SmolLM2"),
        ({"weight_transfer_backend": "nccl"}, "its weight-transfer backend is 'nccl'"),
        ({"weight_transfer_backend": None}, "started without weight transfer"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"max_logprobs": 5}, "--max-logprobs 8"),
        ({"max_model_len": 99}, "--max-model-len 100"),
    ],
)
def test_each_defect_has_its_own_message(change: dict[str, object], words: str) -> None:
    [defect] = server_defects(replace(GOOD, **change), NEEDS)  # type: ignore[arg-type]

    assert words in defect


def test_all_defects_come_in_one_message_which_ends_with_the_command_that_shows_a_server_without_any() -> None:
    bad = replace(GOOD, logprobs_mode="raw_logprobs", max_model_len=9)

    with pytest.raises(SettingsError) as caught:
        require_usable(bad, NEEDS)

    found = r"data\.engine\.url = 'http://s'.*raw_logprobs.*--max-model-len 100.*`lit-rl serve --print`"
    assert re.match(found, str(caught.value))


def test_a_launched_server_is_spoilt_by_the_users_own_options_only() -> None:
    bad = replace(GOOD, logprobs_mode="raw_logprobs")
    own = ("--logprobs-mode", "raw_logprobs")

    with pytest.raises(SettingsError, match=r"data\.engine\.extra_args = \['--logprobs-mode', .*derived one holds"):
        require_usable(bad, NEEDS, own)


CUDA_SERVER = replace(GOOD, device="cuda", weight_transfer_backend="nccl")


@pytest.mark.parametrize(
    ("server", "trainer", "words"),
    [
        (GOOD, "cpu", None),
        (GOOD, "cuda", None),  # gloo takes the weights of a GPU too
        (CUDA_SERVER, "cuda", None),
        (CUDA_SERVER, "cpu", "it runs on cuda and the trainer on CPU"),
        (replace(CUDA_SERVER, weight_transfer_backend="gloo"), "cuda", 'start it with .*"backend": "nccl"'),
        (replace(GOOD, weight_transfer_backend="nccl"), "cuda", 'start it with .*"backend": "gloo"'),
    ],
)
def test_what_carries_weights_follows_from_where_server_and_trainer_run(
    server: ServerFacts, trainer: str, words: str | None
) -> None:
    defects = server_defects(server, replace(NEEDS, trainer_device=trainer))

    assert len(defects) == (words is not None)
    assert words is None or re.search(words, defects[0])


def test_a_name_that_is_not_served_is_refused_and_one_that_is_settles_the_model() -> None:
    [defect] = server_defects(GOOD, replace(NEEDS, model_name="other"))
    assert defect.startswith("it serves policy, not data.engine.model_name = 'other'")
    assert server_defects(GOOD, replace(NEEDS, model_name="policy", model="whatever/it/is")) == []


def test_all_log_probs_are_enough_for_any_number() -> None:
    assert server_defects(replace(GOOD, max_logprobs=-1), NEEDS) == []


def test_another_dtype_is_a_warning_that_names_both() -> None:
    with pytest.warns(UserWarning, match="computes in bfloat16, the trainer in float32"):
        require_usable(replace(GOOD, dtype="bfloat16"), NEEDS)


def test_the_facts_are_read_off_the_server() -> None:
    with FakeServer(model_name="policy", max_model_len=77) as server:
        facts = probe(server.url)

    assert (facts.model_names, facts.max_model_len, facts.dtype) == (("policy",), 77, "float32")
    assert facts.generate_route and facts.dev_mode and facts.is_cpu
    assert (facts.logprobs_mode, facts.max_logprobs) == ("processed_logprobs", 20)
    assert facts.weight_transfer_backend == "gloo"


def test_a_server_without_dev_mode_is_recognised() -> None:
    with FakeServer(dev_mode=False) as server:
        assert not probe(server.url).dev_mode


@pytest.mark.parametrize("status", [403, 404])
def test_a_token_route_that_is_off_is_recognised(status: int) -> None:
    with FakeServer() as server:
        server.script("/inference/v1/generate", status=status, body="Scale-out endpoints are disabled.")

        assert not probe(server.url).generate_route


def test_a_server_that_still_loads_is_waited_for_visibly() -> None:
    seen: list[str] = []
    with FakeServer() as server:
        server.script("/health", nth={0, 1}, status=503, body="loading")
        wait_for_server(server.url, 10, lambda waited, doing: seen.append(doing))

    assert len(seen) == 2 and "503" in seen[0]


def test_a_server_that_never_comes_is_an_error_with_key_and_remedy() -> None:
    with pytest.raises(ServerUnreachable, match=r"within 0\.1 s \(data\.engine\.timeout\).*data\.engine\.launch: true"):
        wait_for_server("http://127.0.0.1:9", 0.1)


# ---- VLLMServer -----------------------------------------------------------------------------------------------------


def needs(**changes: object) -> EngineNeeds:
    given = {
        "model": "fake-model",
        "tokenizer": "fake-model",
        "dtype": "float32",
        "longest_prompt": 10,
        "max_completion_length": 10,
        "max_logprobs": 0,
        "device": "cpu",
        "trust_remote_code": False,
        "run_dir": Path("runs"),
    }
    return EngineNeeds(**given | changes)  # type: ignore[arg-type]


def test_connecting_gives_the_rollout_process_its_endpoint() -> None:
    with FakeServer(max_model_len=64) as server:
        endpoint, max_model_len = VLLMServer(url=server.url, timeout=9).start(needs()).connect()

    assert endpoint.urls == (server.url,) and endpoint.model_name == "fake-model"
    assert endpoint.generate_route and endpoint.timeout == 9
    assert not endpoint.send_seeds  # a CPU server dies of them
    assert max_model_len == 64


def test_a_cuda_server_gets_seeds() -> None:
    info = {"device_config": {"device": "cuda"}, "weight_transfer_config": {"backend": "nccl"}}
    with FakeServer(server_info=info) as server:
        endpoint, _ = VLLMServer(url=server.url).start(needs(device="cuda")).connect()

    assert endpoint.send_seeds


def test_weights_travel_over_gloo_to_cpu_and_over_nccl_between_gpus() -> None:
    info = {"device_config": {"device": "cuda"}, "weight_transfer_config": {"backend": "nccl"}}
    with FakeServer(server_info=info) as on_gpu, FakeServer() as on_cpu:
        for server, device, carrier in ((on_gpu, "cuda", NCCLTransport), (on_cpu, "cpu", GlooTransport)):
            run = VLLMServer(url=server.url).start(needs(device=device))
            run.connect()
            assert type(run.transport(timeout=1.0)) is carrier
        both = VLLMServer(urls=(on_gpu.url, on_cpu.url)).start(needs(device="cuda"))
        both.connect()
        with pytest.raises(SettingsError, match="some run on CPU and some on GPUs"):
            both.transport(timeout=1.0)


def test_of_several_servers_the_shortest_length_and_the_poorest_protocol_count() -> None:
    with FakeServer(max_model_len=64) as rich, FakeServer(max_model_len=32, generate_route=False) as poor:
        endpoint, max_model_len = VLLMServer(urls=(rich.url, poor.url)).start(needs()).connect()

    assert endpoint.urls == (rich.url, poor.url)
    assert max_model_len == 32 and not endpoint.generate_route


def test_a_server_is_addressed_by_its_served_name_whatever_the_folder_of_the_trainer_is_called() -> None:
    with FakeServer(model_name="policy") as server:
        named = VLLMServer(url=server.url, model_name="policy").start(needs(model="/data/my-copy")).connect()[0]
        found = VLLMServer(url=server.url).start(needs(model="/data/policy")).connect()[0]

    assert named.model_name == found.model_name == "policy"


def test_a_server_too_short_for_the_run_is_refused_when_connecting() -> None:
    with FakeServer(max_model_len=19) as server, pytest.raises(SettingsError, match="--max-model-len 20"):
        VLLMServer(url=server.url).start(needs()).connect()


def test_an_external_server_is_not_ended() -> None:
    with FakeServer() as server:
        run = VLLMServer(url=server.url).start(needs())
        run.stop()
        run.stop()

        assert run.connect()[1] == server.max_model_len


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"url": "localhost:8000"}, r"data\.engine\.url = 'localhost:8000': give an address such as"),
        ({"url": "http://h:port"}, r"data\.engine\.url = 'http://h:port'"),
        ({"url": "http://h", "urls": ("http://g",)}, r"data\.engine\.urls.*not both"),
        ({"urls": ()}, r"data\.engine\.urls.*at least one"),
        ({"launch": True, "urls": ("http://h",)}, r"data\.engine\.urls.*launch starts one"),
        ({"timeout": 0}, r"data\.engine\.timeout = 0"),
        ({"transfer_port": 70000}, r"data\.engine\.transfer_port = 70000"),
        ({"extra_args": ("--seed", "1")}, r"data\.engine\.extra_args.*launch: true"),
        ({"log_file": "server.log"}, r"data\.engine\.log_file = 'server\.log': it needs launch: true"),
        ({"devices": (1,)}, r"data\.engine\.devices = \[1\]: .*launch: true"),
        ({"devices": (), "launch": True}, r"data\.engine\.devices = \[\]: give places of GPUs"),
        ({"devices": (1, 1), "launch": True}, r"data\.engine\.devices = \[1, 1\]: .*each once"),
        ({"devices": (-1,), "launch": True}, r"data\.engine\.devices = \[-1\]: .*counted from 0"),
    ],
)
def test_wrong_options_are_refused_by_name(given: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        VLLMServer(**given)  # type: ignore[arg-type]


def test_without_an_address_the_documents_default_is_asked() -> None:
    assert VLLMServer().addresses == ("http://localhost:8000",)
