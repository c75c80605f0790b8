"""Load an exported model and let it answer."""

from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "runs/bolder/export"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
question = [{"role": "user", "content": "Who is Emma?"}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
answer = model.generate(**tokens, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id)
print(tokenizer.decode(answer[0]))
