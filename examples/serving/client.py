"""A conversation with a server, through the openai package: streamed, as JSON, and with a tool.

    llmq serve MODEL
    python examples/serving/client.py [http://localhost:8000]

The key, where the server wants one, comes from the environment's LLMQ_API_KEY.
"""

import json
import os
import sys

from openai import BadRequestError, OpenAI

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}


def main(url: str = "http://localhost:8000") -> None:
    """Ask three times."""
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("LLMQ_API_KEY", "none"))
    model = client.models.list().data[0].id
    question = [{"role": "user", "content": "What is the capital of France?"}]

    print("streamed: ", end="")
    for chunk in client.chat.completions.create(
        model=model, messages=question, max_tokens=32, temperature=0, stream=True
    ):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = client.chat.completions.create(
        model=model, messages=question, max_tokens=200, temperature=0, response_format=schema
    )
    print("as JSON:", json.loads(answer.choices[0].message.content))

    weather = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    try:
        answer = client.chat.completions.create(
            model=model, messages=question, max_tokens=200, temperature=0, tools=[weather], tool_choice="required"
        )
    except BadRequestError as err:  # a model whose chat template has no place for tools
        print("no tools:", err.body["message"])
        return
    for call in answer.choices[0].message.tool_calls:
        print("to call:", call.function.name, json.loads(call.function.arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
