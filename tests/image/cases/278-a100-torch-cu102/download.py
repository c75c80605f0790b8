from transformers import AutoModelForMaskedLM

if __name__ == '__main__':
    AutoModelForMaskedLM.from_pretrained('bert-base-uncased')
