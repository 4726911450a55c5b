// The official client for JavaScript. Lines of JSON as checks.py prints them.
import OpenAI from "openai";

const url = process.env.BATON_URL ?? "http://127.0.0.1:8000";
const model = process.env.BATON_MODEL ?? "smollm2-135m-instruct";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "Name three colours of the rainbow." }];
const basics = { model, messages, temperature: 0, max_tokens: 16 };
const parameters = {
  type: "object",
  properties: { colour: { type: "string", maxLength: 20 } },
  required: ["colour"],
  additionalProperties: false,
};

function same(actual, expected) {
  const shown = JSON.stringify(actual);
  if (shown !== JSON.stringify(expected)) {
    throw new Error(`${shown} is not ${JSON.stringify(expected)}`);
  }
}

const checks = {
  async chat() {
    const answer = await client.chat.completions.create(basics);
    same(answer.usage.completion_tokens, 16);
  },
  async stream() {
    const whole = await client.chat.completions.create(basics);
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...basics, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    same(text, whole.choices[0].message.content);
  },
  async errors() {
    try {
      await client.chat.completions.create({ ...basics, model: "none" });
    } catch (error) {
      same([error.status, error.code], [404, "model_not_found"]);
      return;
    }
    throw new Error("a model that is not there has answered");
  },
  async models() {
    same((await client.models.list()).data.map((one) => one.id), [model]);
  },
  async json_schema() {
    const json_schema = { name: "colour", strict: true, schema: parameters };
    const response_format = { type: "json_schema", json_schema };
    const answer = await client.chat.completions.create({ ...basics, max_tokens: 64, response_format });
    same(Object.keys(JSON.parse(answer.choices[0].message.content)), ["colour"]);
  },
  async tools() {
    const tools = [{ type: "function", function: { name: "paint", parameters } }];
    const more = { tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 128 };
    const answer = await client.chat.completions.create({ ...basics, ...more });
    same(answer.choices[0].message.tool_calls.map((call) => call.function.name), ["paint"]);
  },
  async logprobs() {
    const more = { logprobs: true, top_logprobs: 2, max_tokens: 4 };
    const answer = await client.chat.completions.create({ ...basics, ...more });
    same(answer.choices[0].logprobs.content.length, 4);
  },
};

for (const [check, work] of Object.entries(checks)) {
  let outcome = "pass";
  let why = "";
  try {
    await work();
  } catch (error) {
    why = String(error).slice(0, 300);
    outcome = error?.code === "unsupported_parameter" ? "missing" : "fail";
  }
  console.log(JSON.stringify({ check, outcome, why }));
}
