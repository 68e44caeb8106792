"""How images and videos enter the models of each family.

    family  the interface, which the prompt builder, the learner and the samplers know, and the family of a model
    tower   the size of a vision tower

Private to this room: the families (qwen, gemma3, gemma4, internvl, idefics3, llava_onevision, pixtral), and tiles,
which all but the first share.
"""

__all__ = ["family", "tower"]
