# Names of transformers that this package uses: with its own list, pyright reads all of its models, half of the time.
from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.configuration_utils import PretrainedConfig as PretrainedConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING as CONFIG_MAPPING
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText as AutoModelForImageTextToText
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM as Qwen3MoeForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.trainer_utils import set_seed as set_seed
from transformers.utils.quantization_config import BitsAndBytesConfig as BitsAndBytesConfig
from transformers.utils.quantization_config import CompressedTensorsConfig as CompressedTensorsConfig

__version__: str
