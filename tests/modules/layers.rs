//! Linear, embedding, positional encodings, and the layers that draw random numbers.

use burn::nn::*;

cases! {
    // For a single row Flex sums in f16.
    linear_1d(2.0, 2.0) |lab| {
        let linear = lab.module(LinearConfig::new(16, 12).init(&lab.device));
        linear.forward(lab.input([16]))
    };
    linear_2d(1.5, 1.5) |lab| {
        let linear = lab.module(LinearConfig::new(16, 12).init(&lab.device));
        linear.forward(lab.input([8, 16]))
    };
    linear_3d(1.5, 1.5) |lab| {
        let linear = lab.module(LinearConfig::new(16, 12).init(&lab.device));
        linear.forward(lab.input([2, 5, 16]))
    };
    linear_without_bias_2d(1.5, 1.5) |lab| {
        let config = LinearConfig::new(16, 12).with_bias(false);
        let linear = lab.module(config.init(&lab.device));
        linear.forward(lab.input([8, 16]))
    };
    linear_without_bias_3d(1.5, 1.5) |lab| {
        let config = LinearConfig::new(16, 12).with_bias(false);
        let linear = lab.module(config.init(&lab.device));
        linear.forward(lab.input([2, 5, 16]))
    };
    // A gradient is a sum over rows, too long a one for a half accumulator.
    linear_of_many_rows(2.0, 2.0) |lab| {
        let linear = lab.module(LinearConfig::new(8, 4).init(&lab.device));
        linear.forward(lab.input([2, 2048, 8]))
    };
    // Products of one row, and of one column, with a bias behind them.
    linear_of_one_row(3.0, 3.0) |lab| {
        let first = lab.module(LinearConfig::new(16, 12).init(&lab.device));
        let second = lab.module(LinearConfig::new(12, 16).init(&lab.device));
        second.forward(first.forward(lab.input([1, 16])))
    };
    linear_to_one_column(3.0, 3.0) |lab| {
        let first = lab.module(LinearConfig::new(16, 3).init(&lab.device));
        let second = lab.module(LinearConfig::new(3, 1).init(&lab.device));
        second.forward(first.forward(lab.input([8, 16])))
    };
    linear_in_columns(1.5, 1.5) |lab| {
        let config = LinearConfig::new(16, 12)
            .with_layout(LinearLayout::Col)
            .with_initializer(Initializer::Zeros);
        let linear = config.init(&lab.device);
        // Only its initialization transposes the weight: until then it has another shape.
        linear.weight.val();
        let linear = lab.module(linear);
        linear.forward(lab.input([8, 16]))
    };
    // A perceptron of three layers: half from the first one on.
    linear_stack(3.0, 3.0) |lab| {
        let layers = lab.module(vec![
            LinearConfig::new(16, 24).init(&lab.device),
            LinearConfig::new(24, 24).init(&lab.device),
            LinearConfig::new(24, 8).init(&lab.device),
        ]);
        let input = lab.input([8, 16]);
        layers.iter().fold(input, |x, layer| layer.forward(x).tanh())
    };
    embedding(0.0, 0.0) |lab| {
        let embedding = lab.module(EmbeddingConfig::new(10, 8).init(&lab.device));
        let tokens = lab.integers([4, 12], 10);
        embedding.forward(tokens)
    };
    embedding_and_linear(1.5, 1.5) |lab| {
        let embedding = lab.module(EmbeddingConfig::new(10, 8).init(&lab.device));
        let linear = lab.module(LinearConfig::new(8, 6).init(&lab.device));
        let tokens = lab.integers([4, 12], 10);
        linear.forward(embedding.forward(tokens))
    };
    positional_encoding(0.0, 1.0) |lab| {
        let config = PositionalEncodingConfig::new(16).with_max_sequence_size(32);
        let encoding = lab.module(config.init(&lab.device));
        encoding.forward(lab.input([2, 9, 16]))
    };
    sinusoids(0.0, 1.0) |lab| {
        lab.input([9, 16]) * generate_sinusoids(9, 16, 100, &lab.device)
    };
    rotary_encoding(1.0, 1.0) |lab| {
        let encoding = lab.module(RotaryEncodingConfig::new(16, 8).init(&lab.device));
        encoding.forward(lab.input([2, 3, 9, 8]))
    };
    rotary_encoding_from_an_offset(1.0, 1.0) |lab| {
        let mut encoding = lab.module(RotaryEncodingConfig::new(16, 8).init(&lab.device));
        encoding.shift(1000);
        encoding.apply(lab.input([2, 9, 8]), 5)
    };
    // The outputs are close only if the masks are equal.
    dropout(0.0, 1.0) |lab| {
        let dropout = lab.module(DropoutConfig::new(0.3).init());
        let input = lab.input([16, 32]);
        lab.seed();
        dropout.forward(input)
    };
    gaussian_noise(0.0, 1.0) |lab| {
        let noise = lab.module(GaussianNoiseConfig::new(0.5).init());
        let input = lab.input([16, 32]);
        lab.seed();
        noise.forward(input)
    };
}
