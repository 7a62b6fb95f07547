"""Questions and text in the vocabulary of the tiny tokenizer, one token per word."""

QUIZ = [
    {"question": "w5 w17 w300", "choices": ["w41 w99", "w7", "w12 w8 w3"], "answer": 1},
    {"question": "w44 w2 w311 w77", "choices": ["w501 w63", "w9 w9"], "answer": 0},
    {"question": "w8", "choices": ["w11 w2", "w400 w3 w5", "w100"], "answer": 2},
    {"question": "w120 w121", "choices": ["w10", "w30 w31 w32 w33"], "answer": 0},
]
TEXT = [{"text": "w5 w17 w300 w41 w99 w5 w8 w12"}, {"text": "w44 w2 w311 w77 w501 w63"}]
