// One of the clients for node, against a gateway: `node model_sdks.cjs CLIENT URL` gives the tool, runs its calls, and
// returns their results, as one body and as a stream. Prints, for each, what it read of the first answer and of the last.

const { generateText, stepCountIs, streamText, tool } = require("ai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createGoogleGenerativeAI } = require("@ai-sdk/google");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { Anthropic } = require("@anthropic-ai/sdk");
const { GoogleGenAI } = require("@google/genai");
const { OpenAI } = require("openai");
const { z } = require("zod");

const [, , client, url] = process.argv;
const key = { apiKey: "unused", maxRetries: 0 };
const v1 = { apiKey: "unused", baseURL: `${url}/v1` };
const parameters = { type: "object", properties: { command: { type: "string" } } };
const go = { role: "user", content: "go" };
const resultOf = (n) => `out ${n}`;

const models = {
  ai_chat: () => createOpenAI(v1).chat("m"),
  ai_compatible: () => createOpenAICompatible({ name: "gateway", ...v1 })("m"),
  ai_responses: () => createOpenAI(v1).responses("m"),
  ai_messages: () => createAnthropic(v1)("m"),
  ai_google: () => createGoogleGenerativeAI({ apiKey: "unused", baseURL: `${url}/v1beta` })("m"),
};

async function aiSdk(streamed) {
  let calls = 0;
  const bash = tool({
    description: "Run it.",
    inputSchema: z.object({ command: z.string() }),
    execute: async () => resultOf(calls++),
  });
  let failure;
  const answer = await (streamed ? streamText : generateText)({
    model: models[client](),
    tools: { bash },
    prompt: "go",
    maxRetries: 0,
    maxOutputTokens: 99,
    stopWhen: stepCountIs(2),
    providerOptions: { openai: { store: false } },
    ...(streamed ? { onError: ({ error }) => (failure = error) } : {}),
  });
  const [first, last] = await answer.steps;
  if (failure) throw failure;
  return { text: first.text, commands: first.toolCalls.map((call) => call.input.command), last: last.text };
}

async function chat(streamed) {
  const openai = new OpenAI({ ...key, baseURL: `${url}/v1` });
  const tools = [{ type: "function", function: { name: "bash", description: "Run it.", parameters } }];
  const ask = async (messages) => {
    const body = { model: "m", messages, tools };
    const done = await (streamed
      ? openai.chat.completions.stream(body).finalChatCompletion()
      : openai.chat.completions.create(body));
    return done.choices[0].message;
  };
  const first = await ask([go]);
  const results = first.tool_calls.map((call, n) => ({ role: "tool", tool_call_id: call.id, content: resultOf(n) }));
  const last = await ask([go, first, ...results]);
  const commands = first.tool_calls.map((call) => JSON.parse(call.function.arguments).command);
  return { text: first.content, commands, last: last.content };
}

async function responses(streamed) {
  const openai = new OpenAI({ ...key, baseURL: `${url}/v1` });
  const tools = [{ type: "function", name: "bash", description: "Run it.", strict: false, parameters }];
  const ask = (input) => {
    const body = { model: "m", input, tools };
    return streamed ? openai.responses.stream(body).finalResponse() : openai.responses.create(body);
  };
  const first = await ask([go]);
  const calls = first.output.filter((item) => item.type === "function_call");
  const results = calls.map((call, n) => ({
    type: "function_call_output",
    call_id: call.call_id,
    output: resultOf(n),
  }));
  const last = await ask([go, ...first.output, ...results]);
  const text = first.output.filter((item) => item.type === "message").map((item) => item.content[0].text);
  const commands = calls.map((call) => JSON.parse(call.arguments).command);
  return { text: text.join(""), commands, last: last.output.at(-1).content[0].text };
}

async function messages(streamed) {
  const anthropic = new Anthropic({ ...key, baseURL: url });
  const tools = [{ name: "bash", description: "Run it.", input_schema: parameters }];
  const ask = (history) => {
    const body = { model: "m", max_tokens: 99, messages: history, tools };
    return streamed ? anthropic.messages.stream(body).finalMessage() : anthropic.messages.create(body);
  };
  const first = await ask([go]);
  const calls = first.content.filter((block) => block.type === "tool_use");
  const results = calls.map((call, n) => ({ type: "tool_result", tool_use_id: call.id, content: resultOf(n) }));
  const history = [go, { role: "assistant", content: first.content }, { role: "user", content: results }];
  const last = await ask(history);
  const text = first.content.filter((block) => block.type === "text").map((block) => block.text);
  return { text: text.join(""), commands: calls.map((call) => call.input.command), last: last.content.at(-1).text };
}

async function google(streamed) {
  const genai = new GoogleGenAI({ apiKey: "unused", httpOptions: { baseUrl: url } });
  const tools = [{ functionDeclarations: [{ name: "bash", description: "Run it.", parametersJsonSchema: parameters }] }];
  const chat = genai.chats.create({ model: "m", config: { tools } });
  const ask = async (message) => {
    if (!streamed) return chat.sendMessage({ message });
    let whole;
    for await (const chunk of await chat.sendMessageStream({ message })) whole = chunk;
    return whole;
  };
  const first = await ask("go");
  const calls = first.functionCalls;
  const last = await ask(
    calls.map(({ id, name }, n) => ({ functionResponse: { id, name, response: { output: resultOf(n) } } })),
  );
  return { text: first.text, commands: calls.map((call) => call.args.command), last: last.text };
}

const own = { chat, responses, messages, google };

(async () => {
  const run = own[client] ?? aiSdk;
  console.log(JSON.stringify([await run(false), await run(true)]));
})();
