//! Nothing but the tests of `AmpAutodiff<Dispatch>`, whose dependency no other package needs.
