package roce

import (
	"encoding/binary"

	"ipoibcm/ib"
	"ipoibcm/wire"
)

// Header lengths in octets.
const (
	BTHLen   = 12
	DETHLen  = 8
	AETHLen  = 4
	RETHLen  = 16
	ImmDtLen = 4
	IETHLen  = 4
	ICRCLen  = 4

	// MaxHeaderLen is the largest length of BTH and extension headers in a packet that we send:
	// that of an RDMA WRITE Only with immediate data.
	MaxHeaderLen = BTHLen + RETHLen + ImmDtLen

	atomicETHLen    = 28
	atomicAckETHLen = 8
)

// Pad returns the pad octets, 0 to 3, behind a payload of n octets.
func Pad(n int) int { return -n & 3 }

// A BTH is a view on a base transport header, at least BTHLen octets.
type BTH []byte

// Opcode returns the opcode, known or not.
func (h BTH) Opcode() Opcode { return Opcode(h[0]) }

// Solicited reports the solicited event bit.
func (h BTH) Solicited() bool { return h[1]&0x80 != 0 }

// Pad returns the pad count, 0 to 3.
func (h BTH) Pad() int { return int(h[1] >> 4 & 3) }

// Version returns the transport version, which must be 0.
func (h BTH) Version() uint8 { return h[1] & 0x0f }

// PKey returns the partition key.
func (h BTH) PKey() ib.PKey { return ib.PKey(binary.BigEndian.Uint16(h[2:])) }

// FECN reports the forward congestion bit.
func (h BTH) FECN() bool { return h[4]&0x80 != 0 }

// BECN reports the backward congestion bit.
func (h BTH) BECN() bool { return h[4]&0x40 != 0 }

// DestQPN returns the destination QPN.
func (h BTH) DestQPN() ib.QPN { return ib.QPN(wire.Uint24(h[5:])) }

// AckReq reports the acknowledge request bit (A).
func (h BTH) AckReq() bool { return h[8]&0x80 != 0 }

// PSN returns the packet sequence number.
func (h BTH) PSN() ib.PSN { return ib.PSN(wire.Uint24(h[9:])) }

// MaxReserved is the largest value of the seven reserved bits beside the A bit. They
// are sent as zero and ignored on receipt (IBA volume 1, 9.2.4), unless both ends have
// agreed on their meaning.
const MaxReserved = 0x7f

// Reserved returns the seven reserved bits beside the A bit.
func (h BTH) Reserved() uint8 { return h[8] & MaxReserved }

// SetReserved sets the seven reserved bits beside the A bit.
func (h BTH) SetReserved(v uint8) { h[8] = h[8]&^MaxReserved | v&MaxReserved }

// SetBECN sets or clears the backward congestion bit.
func (h BTH) SetBECN(v bool) { h[4] = h[4]&^0x40 | wire.Bit(v, 0x40) }

// SetAckReq sets or clears the A bit, as a resend may need. The ICRC covers it.
func (h BTH) SetAckReq(v bool) { h[8] = h[8]&^0x80 | wire.Bit(v, 0x80) }

// BTHFields are the values of a BTH that we send. The migration bit, version,
// FECN, BECN and reserved bits go out as zero.
type BTHFields struct {
	Opcode    Opcode
	Solicited bool
	Pad       int // 0 to 3
	PKey      ib.PKey
	DestQPN   ib.QPN
	AckReq    bool
	PSN       ib.PSN
}

// PutBTH writes f into b[:BTHLen].
func PutBTH(b []byte, f BTHFields) {
	_ = b[BTHLen-1]
	b[0] = byte(f.Opcode)
	b[1] = byte(f.Pad&3)<<4 | wire.Bit(f.Solicited, 0x80)
	binary.BigEndian.PutUint16(b[2:], uint16(f.PKey))
	b[4] = 0
	wire.PutUint24(b[5:], uint32(f.DestQPN))
	b[8] = wire.Bit(f.AckReq, 0x80)
	wire.PutUint24(b[9:], uint32(f.PSN))
}

// A DETH is a view on a datagram extended transport header.
type DETH []byte

// QKey returns the Q_Key.
func (h DETH) QKey() ib.QKey { return ib.QKey(binary.BigEndian.Uint32(h)) }

// SrcQPN returns the sender's QPN.
func (h DETH) SrcQPN() ib.QPN { return ib.QPN(wire.Uint24(h[5:])) }

// PutDETH writes a DETH into b[:DETHLen].
func PutDETH(b []byte, k ib.QKey, src ib.QPN) {
	_ = b[DETHLen-1]
	binary.BigEndian.PutUint32(b, uint32(k))
	b[4] = 0
	wire.PutUint24(b[5:], uint32(src))
}

// An AETH is a view on an acknowledge extended transport header.
type AETH []byte

// Syndrome returns the first octet: ACK, RNR NAK or NAK, with its code.
func (h AETH) Syndrome() Syndrome { return Syndrome(h[0]) }

// MSN returns the 24-bit message sequence number.
func (h AETH) MSN() uint32 { return wire.Uint24(h[1:]) }

// PutAETH writes an AETH into b[:AETHLen]. Bits of msn above 24 are dropped.
func PutAETH(b []byte, s Syndrome, msn uint32) {
	_ = b[AETHLen-1]
	b[0] = byte(s)
	wire.PutUint24(b[1:], msn)
}

// A RETH is a view on an RDMA extended transport header.
type RETH []byte

// Addr returns the virtual address at the responder.
func (h RETH) Addr() uint64 { return binary.BigEndian.Uint64(h) }

// RKey returns the R_Key.
func (h RETH) RKey() uint32 { return binary.BigEndian.Uint32(h[8:]) }

// Length returns the octets of the whole message, not of this packet.
func (h RETH) Length() uint32 { return binary.BigEndian.Uint32(h[12:]) }

// PutRETH writes a RETH into b[:RETHLen]; length is that of the message in octets.
func PutRETH(b []byte, addr uint64, rkey, length uint32) {
	_ = b[RETHLen-1]
	binary.BigEndian.PutUint64(b, addr)
	binary.BigEndian.PutUint32(b[8:], rkey)
	binary.BigEndian.PutUint32(b[12:], length)
}

// An ImmDt is a view on immediate data.
type ImmDt []byte

// Value returns the 32 bits in host order.
func (h ImmDt) Value() uint32 { return binary.BigEndian.Uint32(h) }

// PutImmDt writes v into b[:ImmDtLen].
func PutImmDt(b []byte, v uint32) { binary.BigEndian.PutUint32(b, v) }

// An IETH is a view on an invalidate extended transport header.
type IETH []byte

// RKey returns the R_Key to invalidate.
func (h IETH) RKey() uint32 { return binary.BigEndian.Uint32(h) }
