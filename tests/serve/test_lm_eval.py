"""lm-eval's client against the server: it asks for ids, echo and log-probabilities."""

import numpy as np
import pytest

from tests.conformance.api import COMPLETIONS, Api

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity", reason="lm-eval's API client needs tenacity")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of lm-eval's imports
]


@pytest.fixture(scope="module")
def client(server: Api):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=server.base_url + COMPLETIONS, model=server.model, tokenizer_backend="remote", batch_size=3
    )


def test_the_remote_tokenizer(server: Api, client) -> None:
    from lm_eval.utils import check_remote_tokenizer_support

    assert check_remote_tokenizer_support(server.base_url + COMPLETIONS)
    ids = client.tok_encode("Hello, w\u00f6rld")
    assert ids == server.tokens("Hello, w\u00f6rld", add_special_tokens=False)
    assert client.decode_batch([ids]) == ["Hello, w\u00f6rld"]
    assert client.eot_token_id == 2
    assert client.eos_string == "</s>"
    assert "user" in client.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=None)


def test_log_likelihoods_are_the_sums_that_the_server_reports(server: Api, client) -> None:
    from lm_eval.api.instance import Instance

    pairs = [("The sky is", " blue"), ("One and one", " is two"), ("a", "b"), ("It ends", "</s>")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = client.loglikelihood(requests, disable_tqdm=True)
    for (context, continuation), (logprob, _) in zip(pairs, found, strict=True):
        ids, num_context = server.tokens(context + continuation, add_special_tokens=False), len(context)
        choice = server.post(COMPLETIONS, prompt=ids, max_tokens=0, echo=True, logprobs=1, temperature=0).json()[
            "choices"
        ][0]
        rows = choice["logprobs"]["token_logprobs"][num_context:]
        assert len(rows) == len(ids) - num_context > 0
        np.testing.assert_allclose(logprob, sum(rows), rtol=1e-6)


def test_every_token_is_scored_when_the_answer_would_be_over_at_once(server: Api) -> None:
    """lm-eval drops the last row, for the token that it had to ask for."""
    ids = [1, *server.tokens("x", add_special_tokens=False)]  # the fake repeats its prompt: next come x and the end
    for prompt in (ids, [*ids, *ids[1:]]):
        choice = server.post(COMPLETIONS, prompt=prompt, max_tokens=1, echo=True, logprobs=1, temperature=0).json()[
            "choices"
        ][0]
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
