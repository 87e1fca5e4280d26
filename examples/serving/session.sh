#!/bin/sh
# A session with curl:  examples/serving/session.sh [http://localhost:8000]
# The key, where the server wants one, comes from a file with the header: LLMQ_HEADERS=FILE.
set -eu

url=${1:-http://localhost:8000}

ask() {
    curl --silent --show-error --fail-with-body ${LLMQ_HEADERS:+--header "@$LLMQ_HEADERS"} \
        --header 'Content-Type: application/json' "$@"
    echo
}

echo '# what is there'
ask "$url/v1/models"

echo '# a text to continue'
ask "$url/v1/completions" --data '{"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}'

echo '# a conversation, streamed'
ask --no-buffer "$url/v1/chat/completions" --data '{
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16, "temperature": 0, "stream": true, "stream_options": {"include_usage": true}
}'

echo '# an answer that matches a schema'
ask "$url/v1/completions" --data '{
    "prompt": "Is it raining? Answer: ", "max_tokens": 200, "temperature": 0,
    "response_format": {"type": "json_schema", "json_schema": {"name": "rain", "schema": {
        "type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"], "additionalProperties": false}}}
}'

echo '# how many tokens a text has'
ask "$url/tokenize" --data '{"prompt": "Hello, world!"}'

echo '# what is going on'
ask "$url/metrics" | grep '^llmq:slots_free'
