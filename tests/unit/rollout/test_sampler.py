"""Sampling requests: what is sent, what is read, what is tried again."""

import asyncio
import socket
import time

import aiohttp
import pytest

from lit_rl.errors import ServerError, ServerRefused, ServerUnreachable
from lit_rl.rollout.sampler import COMPLETIONS, GENERATE, Sampler, read_answer
from lit_rl.settings import EndpointSpec, RolloutSettings, Sampling
from tests.fakes.server import Answer, FakeServer

ANSWER = Answer([5, 6, 2], [-0.1, -0.2, -0.3])


def sample(servers, *, route=GENERATE, count=1, max_tokens=8, timeout=5.0, seeds=False, together=False, **settings):
    """``count`` answers (exceptions in their place), and the sampler."""
    urls = tuple(server if isinstance(server, str) else server.url for server in servers)
    endpoint = EndpointSpec(urls, "fake-model", timeout, generate_route=route == GENERATE, send_seeds=seeds)

    async def story():
        sampler = Sampler(endpoint, RolloutSettings(**settings), backoff_s=0.01)
        await sampler.open()
        try:
            if together:
                work = [sampler.generate([1, 2, 3], max_tokens) for _ in range(count)]
                return await asyncio.gather(*work, return_exceptions=True), sampler
            results: list = []
            for _ in range(count):
                results += await asyncio.gather(sampler.generate([1, 2, 3], max_tokens), return_exceptions=True)
            return results, sampler
        finally:
            await sampler.close()

    return asyncio.run(story())


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS])
def test_tokens_go_in_and_tokens_come_out(route):
    with FakeServer(lambda call: ANSWER) as server:
        (turn,), sampler = sample([server], route=route)
    assert (turn.prompt_ids, turn.output_ids, turn.output_log_probs) == ([1, 2, 3], [5, 6, 2], [-0.1, -0.2, -0.3])
    assert turn.finish_reason == "stop"
    assert sampler.generated_tokens == 3
    assert [call.prompt_ids for call in server.calls(route)] == [[1, 2, 3]]


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS])
def test_every_sampling_field_is_sent_neutral_where_the_user_left_it_unset(route):
    with FakeServer(lambda call: ANSWER) as server:
        sample([server], route=route, sampling=Sampling(temperature=0.7))
        sent = server.calls(route)[0].sampling
    wanted = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    wanted |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1, "max_tokens": 8, "logprobs": 0}
    assert {name: sent[name] for name in wanted} == wanted
    assert "seed" not in sent


def test_further_sampling_options_of_the_user_are_sent():
    with FakeServer(lambda call: ANSWER) as server:
        sample([server], sampling=Sampling(extra={"stop": ["\n"], "presence_penalty": 0.5}))
        sent = server.generations[0].sampling
    assert (sent["stop"], sent["presence_penalty"]) == (["\n"], 0.5)
    assert "detokenize" not in sent  # a stop string needs the server's text


def test_seeds_are_sent_only_where_the_server_bears_them():
    with FakeServer(lambda call: ANSWER) as server:
        sample([server], seeds=True, count=3)
        sent = [call.sampling["seed"] for call in server.generations]
    assert len(set(sent)) == 3


def test_an_answer_that_is_too_long_is_cut_by_the_server():
    with FakeServer(lambda call: ANSWER) as server:
        (turn,), _ = sample([server], max_tokens=2)
    assert (turn.output_ids, turn.finish_reason) == ([5, 6], "length")


def test_each_token_is_labelled_with_the_policy_version_that_gave_it():
    answer = Answer([5, 6, 2], weight_versions=[("3", 0, 1), ("4", 1, 3)])
    with FakeServer(lambda call: answer) as server:
        (turn,), _ = sample([server])
    assert turn.policy_versions == [3, 4, 4]


def test_labels_that_are_no_versions_of_ours_are_left_out():
    with FakeServer(lambda call: ANSWER) as server:  # a server before its first sync says "default"
        (turn,), _ = sample([server])
    assert turn.policy_versions is None


def test_a_broken_connection_is_tried_again_at_once():
    with FakeServer(lambda call: ANSWER) as server:
        server.script(GENERATE, nth={0}, close=True)
        (turn,), sampler = sample([server])
    assert turn.output_ids == [5, 6, 2]
    assert sampler.retries == 1


def test_a_server_error_is_tried_again_as_often_as_configured_and_told_in_its_words():
    with FakeServer(lambda call: ANSWER) as server:
        server.script(GENERATE, status=500, body="out of memory")
        (error,), sampler = sample([server], max_retries=2)
        assert len(server.generations) == 3
    assert isinstance(error, ServerRefused) and error.status == 500
    assert "out of memory" in str(error) and sampler.retries == 2


def test_without_retries_there_is_one_try():
    with FakeServer(lambda call: ANSWER) as server:
        server.script(GENERATE, status=503)
        (error,), sampler = sample([server], max_retries=0)
        assert len(server.generations) == 1
    assert isinstance(error, ServerRefused) and sampler.retries == 0


def test_a_refusal_is_never_tried_again():
    with FakeServer(lambda call: ANSWER) as server:
        server.script(GENERATE, status=400, body="prompt too long")
        (error,), sampler = sample([server], max_retries=5)
        assert len(server.generations) == 1
    assert str(error) == f"the server answered {GENERATE} with status 400: prompt too long"
    assert sampler.retries == 0


def test_a_server_that_never_answers_is_given_up_after_the_timeout():
    with FakeServer(lambda call: ANSWER) as server:
        server.script(GENERATE, never=True)
        started = time.monotonic()
        (error,), _ = sample([server], timeout=0.2, max_retries=1)
    assert isinstance(error, ServerUnreachable) and "0.2 s" in str(error)
    assert time.monotonic() - started < 5


def test_a_closed_port_is_unreachable():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        (error,), sampler = sample([url], max_retries=1)
    assert isinstance(error, ServerUnreachable) and url in str(error)
    assert sampler.retries == 1


def test_an_aborted_request_is_sampled_again():
    answers = [Answer([], [], "abort"), ANSWER]
    with FakeServer(lambda call: answers[min(call.number, 1)]) as server:
        (turn,), _ = sample([server])
    assert turn.output_ids == [5, 6, 2]


def test_requests_are_spread_over_the_servers():
    with FakeServer(lambda call: ANSWER, latency=0.2) as one, FakeServer(lambda call: ANSWER, latency=0.2) as two:
        sample([one, two], count=6, together=True)
        assert (len(one.generations), len(two.generations)) == (3, 3)


def test_a_try_that_failed_goes_to_the_other_server():
    with FakeServer(lambda call: ANSWER) as good, FakeServer() as bad:
        bad.script(GENERATE, status=500)
        turns, _ = sample([bad, good], count=2)
    assert [turn.output_ids for turn in turns] == [[5, 6, 2]] * 2


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS])
def test_the_most_likely_tokens_come_by_id_and_the_sampled_one_only_by_its_rank(route):
    """The second token was sampled against the odds: its rank is 4, and two are asked for."""
    likely = [[(5, -0.1), (6, -2.5), (8, -4.0)], [(6, -0.2), (8, -2.0), (9, -2.5)]]
    with FakeServer(lambda call: Answer([5, 7], [-0.1, -3.0], candidates=likely)) as server:
        (turn,), _ = sample([server], route=route, num_sampler_logprobs=2)
    assert turn.output_log_probs == [-0.1, -3.0]
    assert turn.output_sampler_logprobs == [{5: -0.1, 6: -2.5}, {6: -0.2, 8: -2.0}]


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS])
def test_candidates_without_a_log_prob_are_absent(route):
    """Truncated sampling leaves two tokens; the server writes -9999 for the others."""
    likely = [[(5, -0.1), (6, -2.5), (8, float("-inf"))]]
    with FakeServer(lambda call: Answer([6], [-2.5], candidates=likely)) as server:
        (turn,), _ = sample([server], route=route, num_sampler_logprobs=3)
    assert turn.output_sampler_logprobs == [{6: -2.5, 5: -0.1}]


def test_candidates_that_are_not_asked_for_are_not_kept():
    with FakeServer(lambda call: Answer([5], [-0.1], candidates=[[(5, -0.1), (6, -2.5)]])) as server:
        (turn,), _ = sample([server])
    assert turn.output_sampler_logprobs is None


def completion(**changes):
    logprobs = {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [-0.1, -0.2]} | changes
    return {"choices": [{"token_ids": [5, 6], "logprobs": logprobs, "finish_reason": "stop"}]}


def test_two_tokens_that_print_alike_are_told_apart_by_their_ids():
    turn = read_answer(completion(), COMPLETIONS, [1])
    assert turn.output_log_probs == [-0.1, -0.2]
    with pytest.raises(ServerError, match="position 1 is token 6, its log-prob is of 5"):
        read_answer(completion(tokens=["token_id:5", "token_id:5"]), COMPLETIONS, [1])


def test_a_server_that_names_tokens_by_their_text_is_read_by_their_order():
    turn = read_answer(completion(tokens=["a", "a"]), COMPLETIONS, [1])
    assert (turn.output_ids, turn.output_log_probs) == ([5, 6], [-0.1, -0.2])


@pytest.mark.parametrize("missing", [None, -9999.0, float("nan")])
def test_a_token_without_a_log_prob_is_an_error_that_names_its_position(missing):
    with pytest.raises(ServerError, match=r"position 1 \(token 6\)"):
        read_answer(completion(token_logprobs=[-0.1, missing]), COMPLETIONS, [1])


def test_fewer_log_probs_than_tokens_are_an_error():
    with pytest.raises(ServerError, match="2 tokens and 1 log-probs"):
        read_answer(completion(tokens=["token_id:5"], token_logprobs=[-0.1]), COMPLETIONS, [1])


def test_an_answer_without_the_fields_asked_for_is_an_error():
    with pytest.raises(ServerError, match="without the fields asked for"):
        read_answer({"choices": [{"text": "hi"}]}, COMPLETIONS, [1])


@pytest.mark.parametrize(("enabled", "status"), [(True, 400), (False, 403)])
def test_the_fake_refuses_a_malformed_and_a_forbidden_request_as_the_real_server_does(enabled, status):
    async def story():
        async with aiohttp.ClientSession() as session, session.post(server.url + GENERATE, json={}) as response:
            return response.status

    with FakeServer(generate_route=enabled) as server:
        assert asyncio.run(story()) == status
