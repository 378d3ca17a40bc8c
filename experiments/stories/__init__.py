"""The paper's fine-tuning figure: when did data matter to a pretrained model that saw it once, or three times?"""
