//! Attention and transformers. A key's bias shifts every score of a query alike, which the softmax
//! cancels: its gradient is rounding and nothing else.

use burn::nn::attention::*;
use burn::nn::transformer::*;
use burn::tensor::module::attention as dot_product;
use burn::tensor::ops::AttentionModuleOptions;

use crate::harness::{DROPOUT_AFTER_SOFTMAX, Lab, Run};

/// The last keys of the second sequence are padding.
fn padding<B: Run>(lab: &Lab<B>) -> bools!(B, 2) {
    let tokens = vec![vec![1, 2, 3, 4, 5, 6], vec![1, 2, 3]];
    generate_padding_mask(0, tokens, None, &lab.device).mask
}

fn autoregressive<B: Run>(lab: &Lab<B>) -> bools!(B, 3) {
    generate_autoregressive_mask(2, 6, &lab.device)
}

fn multi_head<B: Run>(lab: &mut Lab<B>) -> of!(B, MultiHeadAttention) {
    lab.cancels("key.bias");
    let config = MultiHeadAttentionConfig::new(16, 4).with_dropout(0.0);
    lab.module(config.init(&lab.device))
}

/// Query, key and value of an attention of three heads over six keys.
fn query_key_value<B: Run>(lab: &mut Lab<B>) -> [floats!(B, 4); 3] {
    [
        lab.input([2, 3, 4, 8]),
        lab.input([2, 3, 6, 8]),
        lab.input([2, 3, 6, 8]),
    ]
}

fn encoder() -> TransformerEncoderConfig {
    TransformerEncoderConfig::new(16, 32, 4, 2).with_dropout(0.0)
}

fn decoder() -> TransformerDecoderConfig {
    TransformerDecoderConfig::new(16, 32, 4, 2).with_dropout(0.0)
}

cases! {
    mha(4.0, 4.0) |lab| {
        let mha = multi_head(lab);
        let output = mha.forward(MhaInput::self_attn(lab.input([2, 6, 16])));
        lab.output("weights", output.weights);
        output.context
    };
    mha_cross(4.0, 4.0) |lab| {
        let mha = multi_head(lab);
        let (query, key) = (lab.input([2, 4, 16]), lab.input([2, 6, 16]));
        let value = lab.input([2, 6, 16]);
        mha.forward(MhaInput::new(query, key, value)).context
    };
    mha_padded(3.0, 4.0) |lab| {
        let mha = multi_head(lab);
        let input = MhaInput::self_attn(lab.input([2, 6, 16]));
        let output = mha.forward(input.mask_pad(padding(lab)));
        lab.output("weights", output.weights);
        output.context
    };
    mha_autoregressive(3.0, 3.0) |lab| {
        let mha = multi_head(lab);
        let input = MhaInput::self_attn(lab.input([2, 6, 16]));
        let output = mha.forward(input.mask_attn(autoregressive(lab)));
        lab.output("weights", output.weights);
        output.context
    };
    mha_padded_and_autoregressive(4.0, 4.0) |lab| {
        let mha = multi_head(lab);
        let input = MhaInput::self_attn(lab.input([2, 6, 16]));
        let input = input.mask_pad(padding(lab)).mask_attn(autoregressive(lab));
        mha.forward(input).context
    };
    // The mask of many models, which f16 does not hold.
    mha_masked_with_minus_1e9(4.0, 4.0) |lab| {
        lab.cancels("key.bias");
        let config = MultiHeadAttentionConfig::new(16, 4).with_dropout(0.0).with_min_float(-1e9);
        let mha = lab.module(config.init(&lab.device));
        let input = MhaInput::self_attn(lab.input([2, 6, 16]));
        mha.forward(input.mask_attn(autoregressive(lab))).context
    };
    // A sequence of only padding attends to all of it alike: minus infinity would give NaN.
    mha_of_padding_alone(4.0, 4.0) |lab| {
        lab.cancels("key.bias");
        let config = MultiHeadAttentionConfig::new(16, 4).with_dropout(0.0).with_min_float(-1e9);
        let mha = lab.module(config.init(&lab.device));
        let input = MhaInput::self_attn(lab.input([2, 6, 16]));
        let tokens = vec![vec![1, 2, 3, 4, 5, 6], vec![]];
        let mask = generate_padding_mask(0, tokens, None, &lab.device).mask;
        mha.forward(input.mask_pad(mask)).context
    };
    mha_quiet(6.0, 6.0) |lab| {
        let config =
            MultiHeadAttentionConfig::new(16, 4).with_dropout(0.0).with_quiet_softmax(true);
        let mha = lab.module(config.init(&lab.device));
        let input = MhaInput::self_attn(lab.input([2, 6, 16]));
        mha.forward(input.mask_pad(padding(lab))).context
    };
    mha_with_dropout(6.0, 6.0) |lab| {
        if DROPOUT_AFTER_SOFTMAX {
            lab.cancels("key.bias");
        }
        let mha = lab.module(MultiHeadAttentionConfig::new(16, 4).init(&lab.device));
        let input = MhaInput::self_attn(lab.input([2, 6, 16]));
        lab.seed();
        mha.forward(input).context
    };
    // With a cache there is one new row at a time, over which Flex sums in f16: twice the error.
    mha_cached(8.0, 8.0) |lab| {
        let mha = multi_head(lab);
        let input = lab.input([2, 6, 16]);
        let mut cache = MhaCache::autoregressive();
        let mut step = |length| {
            let seen = MhaInput::self_attn(input.clone().slice([0..2, 0..length]));
            mha.forward_cache(seen, &mut cache).context
        };
        for length in 1..4 {
            lab.output(&format!("{length}"), step(length));
        }
        step(4)
    };
    cross_attention(4.0, 4.0) |lab| {
        lab.cancels("key.bias");
        let config = CrossAttentionConfig::new(16, 12, 4, 4, 4).with_dropout(0.0);
        let attention = lab.module(config.init(&lab.device));
        let (query, context) = (lab.input([2, 4, 16]), lab.input([2, 6, 12]));
        attention.forward(query, context, None)
    };
    cross_attention_grouped_and_masked(4.0, 4.0) |lab| {
        lab.cancels("key.bias");
        let config = CrossAttentionConfig::new(16, 12, 4, 2, 4).with_dropout(0.0);
        let attention = lab.module(config.init(&lab.device));
        let (query, context) = (lab.input([2, 4, 16]), lab.input([2, 6, 12]));
        attention.forward(query, context, Some(padding(lab)))
    };
    cross_attention_quiet(6.0, 6.0) |lab| {
        let config = CrossAttentionConfig::new(16, 12, 4, 4, 4)
            .with_dropout(0.0)
            .with_quiet_softmax(true);
        let attention = lab.module(config.init(&lab.device));
        let (query, context) = (lab.input([2, 4, 16]), lab.input([2, 6, 12]));
        attention.forward(query, context, None)
    };
    cross_attention_cached(6.0, 6.0) |lab| {
        lab.cancels("key.bias");
        let config = CrossAttentionConfig::new(16, 12, 4, 4, 4).with_dropout(0.0);
        let attention = lab.module(config.init(&lab.device));
        let (query, context) = (lab.input([2, 4, 16]), lab.input([2, 6, 12]));
        let mut cache = CrossAttentionCache::new();
        let first = attention.forward_cache(query.clone(), context.clone(), None, &mut cache);
        lab.output("first", first);
        attention.forward_cache(query, context, None, &mut cache)
    };
    dot_product_attention(2.0, 2.0) |lab| {
        let [query, key, value] = query_key_value(lab);
        dot_product(query, key, value, None, None, AttentionModuleOptions::default())
    };
    dot_product_attention_causal(2.0, 2.0) |lab| {
        let [query, key, value] = query_key_value(lab);
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        dot_product(query, key, value, None, None, options)
    };
    dot_product_attention_masked_biased_capped(3.0, 3.0) |lab| {
        let [query, key, value] = query_key_value(lab);
        let mask = padding(lab).reshape([2, 1, 1, 6]).expand([2, 3, 4, 6]);
        let bias = lab.input([2, 3, 4, 6]);
        let options = AttentionModuleOptions {
            scale: Some(0.5),
            softcap: Some(4.0),
            ..Default::default()
        };
        dot_product(query, key, value, Some(mask), Some(bias), options)
    };
    // Before they are scaled, these scores are beyond 65504.
    dot_product_attention_of_large_values(2.0, 2.0) |lab| {
        let query = lab.scaled_input([2, 3, 4, 8], 16384.0);
        let (key, value) = (lab.input([2, 3, 6, 8]), lab.input([2, 3, 6, 8]));
        let options = AttentionModuleOptions { scale: Some(1.0 / 16384.0), ..Default::default() };
        dot_product(query, key, value, None, None, options)
    };
    feed_forward(3.0, 3.0) |lab| {
        let config = PositionWiseFeedForwardConfig::new(16, 32).with_dropout(0.0);
        let feed_forward = lab.module(config.init(&lab.device));
        feed_forward.forward(lab.input([2, 6, 16]))
    };
    transformer_encoder(8.0, 8.0) |lab| {
        lab.cancels("key.bias");
        let transformer = lab.module(encoder().init(&lab.device));
        transformer.forward(TransformerEncoderInput::new(lab.input([2, 6, 16])))
    };
    transformer_encoder_masked_norm_first(12.0, 12.0) |lab| {
        lab.cancels("key.bias");
        let transformer = lab.module(encoder().with_norm_first(true).init(&lab.device));
        let input = TransformerEncoderInput::new(lab.input([2, 6, 16]));
        transformer.forward(input.mask_pad(padding(lab)).mask_attn(autoregressive(lab)))
    };
    transformer_encoder_with_dropout(16.0, 16.0) |lab| {
        if DROPOUT_AFTER_SOFTMAX {
            lab.cancels("key.bias");
        }
        let transformer = lab.module(encoder().with_dropout(0.1).init(&lab.device));
        let input = lab.input([2, 6, 16]);
        lab.seed();
        transformer.forward(TransformerEncoderInput::new(input))
    };
    transformer_encoder_cached(16.0, 24.0) |lab| {
        lab.cancels("key.bias");
        let transformer = lab.module(encoder().init(&lab.device));
        let input = lab.input([2, 6, 16]);
        let mut cache = transformer.new_autoregressive_cache();
        let mut step = |length| {
            let seen = TransformerEncoderInput::new(input.clone().slice([0..2, 0..length]));
            transformer.forward_autoregressive_inference(seen, &mut cache)
        };
        for length in 1..4 {
            lab.output(&format!("{length}"), step(length));
        }
        step(4)
    };
    transformer_decoder(8.0, 8.0) |lab| {
        lab.cancels("key.bias");
        let transformer = lab.module(decoder().init(&lab.device));
        let (target, memory) = (lab.input([2, 4, 16]), lab.input([2, 6, 16]));
        transformer.forward(TransformerDecoderInput::new(target, memory))
    };
    transformer_decoder_masked_norm_first(8.0, 8.0) |lab| {
        lab.cancels("key.bias");
        let transformer = lab.module(decoder().with_norm_first(true).init(&lab.device));
        let (target, memory) = (lab.input([2, 6, 16]), lab.input([2, 6, 16]));
        let input = TransformerDecoderInput::new(target, memory)
            .memory_mask_pad(padding(lab))
            .target_mask_pad(padding(lab))
            .target_mask_attn(autoregressive(lab));
        transformer.forward(input)
    };
    transformer_decoder_cached(16.0, 16.0) |lab| {
        lab.cancels("key.bias");
        let transformer = lab.module(decoder().init(&lab.device));
        let (target, memory) = (lab.input([2, 4, 16]), lab.input([2, 6, 16]));
        let mut cache = transformer.new_autoregressive_cache();
        let mut step = |length| {
            let seen = target.clone().slice([0..2, 0..length]);
            let input = TransformerDecoderInput::new(seen, memory.clone());
            transformer.forward_autoregressive_inference(input, &mut cache)
        };
        for length in 1..4 {
            lab.output(&format!("{length}"), step(length));
        }
        step(4)
    };
}
