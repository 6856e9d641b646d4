// Package sums computes the CRC-32 of Ethernet, on which the ICRC of RoCE is
// built, as fast as the processor can. It is no codec: what is summed, in which
// order and from which start is for its callers.
//
// On amd64 with AVX-512 it does so in assembly; everywhere else, and with the
// build tag purego, with the standard library.
package sums
