// Package sums computes the CRC-32 of Ethernet, on which the ICRC of RoCE is
// built, and the internet checksum, as fast as the processor can. It is no codec:
// what is summed, in which order and from which start is for its callers.
//
// On amd64 longer inputs go through assembly: the CRC with AVX-512, the checksum
// with AVX2. Everywhere else, and with the build tag purego, the one is the
// standard library's and the other plain Go.
package sums
