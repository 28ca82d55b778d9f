"""The language model: one configuration and one modeling file for every mixer, native to Hugging Face.

Importing this package registers ``MetaplasticConfig`` and ``MetaplasticForCausalLM`` with ``AutoConfig``,
``AutoModel`` and ``AutoModelForCausalLM``.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .cache import fork_cache
from .cache_files import load_cache, save_cache
from .configuration import MetaplasticConfig
from .modeling import MetaplasticForCausalLM, MetaplasticModel
from .plasticity import metaplastic_form
from .size import ModelSize, size

AutoConfig.register(MetaplasticConfig.model_type, MetaplasticConfig)
AutoModel.register(MetaplasticConfig, MetaplasticModel)
AutoModelForCausalLM.register(MetaplasticConfig, MetaplasticForCausalLM)

__all__ = [
    "MetaplasticConfig",
    "MetaplasticForCausalLM",
    "MetaplasticModel",
    "ModelSize",
    "fork_cache",
    "load_cache",
    "metaplastic_form",
    "save_cache",
    "size",
]
