from vllm import LLM
llm = LLM('Qwen/Qwen2.5-0.5B-Instruct')
