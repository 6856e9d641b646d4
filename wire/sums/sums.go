// Package sums computes the CRC-32 of Ethernet, on which the ICRC of RoCE is
// built, and the internet checksum, as fast as the processor can. It is no codec:
// its callers decide what is summed, in which order and from which start.
//
// On amd64 longer inputs go through assembly: the CRC with AVX-512, the checksum
// with AVX2. Everywhere else, and with the build tag purego, the CRC is the
// standard library's and the checksum plain Go.
package sums
