//! Recurrent networks over five steps.

use burn::nn::activation::ActivationConfig;
use burn::nn::*;

cases! {
    rnn(3.0, 3.0) |lab| {
        let rnn = lab.module(RnnConfig::new(8, 6, true).init(&lab.device));
        let (output, state) = rnn.forward(lab.input([3, 5, 8]), None);
        lab.output("hidden", state.hidden);
        output
    };
    rnn_with_options(3.0, 3.0) |lab| {
        let config = RnnConfig::new(8, 6, false)
            .with_batch_first(false)
            .with_reverse(true)
            .with_clip(Some(0.75))
            .with_hidden_activation(ActivationConfig::Relu);
        let rnn = lab.module(config.init(&lab.device));
        let (input, hidden) = (lab.input([5, 3, 8]), lab.input([3, 6]));
        let (output, state) = rnn.forward(input, Some(RnnState::new(hidden)));
        lab.output("hidden", state.hidden);
        output
    };
    bi_rnn(6.0, 6.0) |lab| {
        let rnn = lab.module(BiRnnConfig::new(8, 6, true).init(&lab.device));
        let (output, state) = rnn.forward(lab.input([3, 5, 8]), None);
        lab.output("hidden", state.hidden);
        output
    };
    bi_rnn_with_state(6.0, 6.0) |lab| {
        let rnn = lab.module(BiRnnConfig::new(8, 6, true).init(&lab.device));
        let (input, hidden) = (lab.input([3, 5, 8]), lab.input([2, 3, 6]));
        let (output, state) = rnn.forward(input, Some(RnnState::new(hidden)));
        lab.output("hidden", state.hidden);
        output
    };
    lstm(7.0, 7.0) |lab| {
        let lstm = lab.module(LstmConfig::new(8, 6, true).init(&lab.device));
        let (output, state) = lstm.forward(lab.input([3, 5, 8]), None);
        lab.output("cell", state.cell);
        lab.output("hidden", state.hidden);
        output
    };
    lstm_with_options(6.0, 6.0) |lab| {
        let config = LstmConfig::new(8, 6, false)
            .with_batch_first(false)
            .with_reverse(true)
            .with_clip(Some(0.75))
            .with_input_forget(true);
        let lstm = lab.module(config.init(&lab.device));
        let input = lab.input([5, 3, 8]);
        let state = LstmState::new(lab.input([3, 6]), lab.input([3, 6]));
        let (output, state) = lstm.forward(input, Some(state));
        lab.output("cell", state.cell);
        lab.output("hidden", state.hidden);
        output
    };
    bi_lstm(6.0, 6.0) |lab| {
        let lstm = lab.module(BiLstmConfig::new(8, 6, true).init(&lab.device));
        let (output, state) = lstm.forward(lab.input([3, 5, 8]), None);
        lab.output("cell", state.cell);
        lab.output("hidden", state.hidden);
        output
    };
    bi_lstm_with_state(6.0, 8.0) |lab| {
        let lstm = lab.module(BiLstmConfig::new(8, 6, true).init(&lab.device));
        let input = lab.input([3, 5, 8]);
        let state = LstmState::new(lab.input([2, 3, 6]), lab.input([2, 3, 6]));
        let (output, state) = lstm.forward(input, Some(state));
        lab.output("cell", state.cell);
        lab.output("hidden", state.hidden);
        output
    };
    gru(3.0, 3.0) |lab| {
        let gru = lab.module(GruConfig::new(8, 6, true).init(&lab.device));
        gru.forward(lab.input([3, 5, 8]), None)
    };
    gru_with_options(8.0, 8.0) |lab| {
        let config = GruConfig::new(8, 6, false).with_reset_after(false).with_clip(Some(0.75));
        let gru = lab.module(config.init(&lab.device));
        let (input, state) = (lab.input([3, 5, 8]), lab.input([3, 6]));
        gru.forward(input, Some(state))
    };
    bi_gru(4.0, 4.0) |lab| {
        let gru = lab.module(BiGruConfig::new(8, 6, true).init(&lab.device));
        let (output, state) = gru.forward(lab.input([3, 5, 8]), None);
        lab.output("state", state);
        output
    };
    bi_gru_with_state(4.0, 4.0) |lab| {
        let config = BiGruConfig::new(8, 6, true).with_batch_first(false);
        let gru = lab.module(config.init(&lab.device));
        let (input, state) = (lab.input([5, 3, 8]), lab.input([2, 3, 6]));
        let (output, state) = gru.forward(input, Some(state));
        lab.output("state", state);
        output
    };
    gate_controller(2.0, 2.0) |lab| {
        let initializer = burn::nn::Initializer::Zeros;
        let gate = GateController::new(8, 6, true, initializer, &lab.device);
        let gate = lab.module(gate);
        let (input, hidden) = (lab.input([3, 8]), lab.input([3, 6]));
        gate.gate_product(input, hidden)
    };
}
