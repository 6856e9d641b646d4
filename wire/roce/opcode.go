// Package roce reads and writes RoCEv2 packets: BTH and the extension headers,
// the ICRC, and for captures and tests the IP and UDP headers in front.
//
// On the hot path headers are views on octets ([BTH], [DETH], …) with Put
// functions, and nothing allocates. It keeps no sequence numbers, checks no
// keys and knows no queue pair: engines above do.
//
// Sources: IBA volume 1 chapter 9 and annex A17, as the Linux rxe driver and adapters speak it.
// Missing: atomics, flush and RD headers, whose opcodes are only recognised by
// length or refused.
package roce

import (
	"fmt"

	"ipoibcm/ib"
)

// Port is the UDP destination port of RoCEv2.
const Port = 4791

// An Opcode is the first octet of a BTH: 3 bits of service, 5 of operation.
type Opcode uint8

// Reliable connection. These are also the operations that [Opcode.Operation]
// returns for the other services.
const (
	RCSendFirst Opcode = 0x00 + iota
	RCSendMiddle
	RCSendLast
	RCSendLastImm
	RCSendOnly
	RCSendOnlyImm
	RCWriteFirst
	RCWriteMiddle
	RCWriteLast
	RCWriteLastImm
	RCWriteOnly
	RCWriteOnlyImm
	RCReadRequest
	RCReadResponseFirst
	RCReadResponseMiddle
	RCReadResponseLast
	RCReadResponseOnly
	RCAck
	RCAtomicAck
	RCCompareSwap
	RCFetchAdd
	_
	RCSendLastInv
	RCSendOnlyInv
)

// Unreliable connection.
const (
	UCSendFirst Opcode = 0x20 + iota
	UCSendMiddle
	UCSendLast
	UCSendLastImm
	UCSendOnly
	UCSendOnlyImm
	UCWriteFirst
	UCWriteMiddle
	UCWriteLast
	UCWriteLastImm
	UCWriteOnly
	UCWriteOnlyImm
)

// Unreliable datagram, and the congestion notification packet.
const (
	UDSendOnly    Opcode = 0x64
	UDSendOnlyImm Opcode = 0x65
	CNP           Opcode = 0x81
)

// opBits are the properties of an opcode.
type opBits uint16

const (
	opValid opBits = 1 << iota
	opFirst
	opMiddle
	opLast
	opOnly
	opSend
	opWrite
	opReadResponse
	opImm
	opInv
	opDETH
	opAETH
	opRETH
	opAtomic
	opAtomicAck
)

var opTable = [256]opBits{
	RCSendFirst:          opValid | opSend | opFirst,
	RCSendMiddle:         opValid | opSend | opMiddle,
	RCSendLast:           opValid | opSend | opLast,
	RCSendLastImm:        opValid | opSend | opLast | opImm,
	RCSendOnly:           opValid | opSend | opOnly,
	RCSendOnlyImm:        opValid | opSend | opOnly | opImm,
	RCWriteFirst:         opValid | opWrite | opFirst | opRETH,
	RCWriteMiddle:        opValid | opWrite | opMiddle,
	RCWriteLast:          opValid | opWrite | opLast,
	RCWriteLastImm:       opValid | opWrite | opLast | opImm,
	RCWriteOnly:          opValid | opWrite | opOnly | opRETH,
	RCWriteOnlyImm:       opValid | opWrite | opOnly | opRETH | opImm,
	RCReadRequest:        opValid | opOnly | opRETH,
	RCReadResponseFirst:  opValid | opReadResponse | opFirst | opAETH,
	RCReadResponseMiddle: opValid | opReadResponse | opMiddle,
	RCReadResponseLast:   opValid | opReadResponse | opLast | opAETH,
	RCReadResponseOnly:   opValid | opReadResponse | opOnly | opAETH,
	RCAck:                opValid | opOnly | opAETH,
	RCAtomicAck:          opValid | opOnly | opAETH | opAtomicAck,
	RCCompareSwap:        opValid | opOnly | opAtomic,
	RCFetchAdd:           opValid | opOnly | opAtomic,
	RCSendLastInv:        opValid | opSend | opLast | opInv,
	RCSendOnlyInv:        opValid | opSend | opOnly | opInv,

	UCSendFirst:    opValid | opSend | opFirst,
	UCSendMiddle:   opValid | opSend | opMiddle,
	UCSendLast:     opValid | opSend | opLast,
	UCSendLastImm:  opValid | opSend | opLast | opImm,
	UCSendOnly:     opValid | opSend | opOnly,
	UCSendOnlyImm:  opValid | opSend | opOnly | opImm,
	UCWriteFirst:   opValid | opWrite | opFirst | opRETH,
	UCWriteMiddle:  opValid | opWrite | opMiddle,
	UCWriteLast:    opValid | opWrite | opLast,
	UCWriteLastImm: opValid | opWrite | opLast | opImm,
	UCWriteOnly:    opValid | opWrite | opOnly | opRETH,
	UCWriteOnlyImm: opValid | opWrite | opOnly | opRETH | opImm,

	UDSendOnly:    opValid | opSend | opOnly | opDETH,
	UDSendOnlyImm: opValid | opSend | opOnly | opDETH | opImm,

	CNP: opValid | opOnly,
}

// opHeaderLen holds BTH and extension headers in octets; 0 where not valid.
var opHeaderLen = func() (t [256]uint8) {
	for o, f := range opTable {
		if f&opValid == 0 {
			continue
		}
		n := BTHLen
		for _, e := range [...]struct {
			bit opBits
			n   int
		}{{opDETH, DETHLen}, {opAETH, AETHLen}, {opRETH, RETHLen}, {opImm, ImmDtLen}, {opInv, IETHLen},
			{opAtomic, atomicETHLen}, {opAtomicAck, atomicAckETHLen}} {
			if f&e.bit != 0 {
				n += e.n
			}
		}
		t[o] = uint8(n)
	}
	return t
}()

// With returns the opcode of service t for the operation of o, an RC opcode:
// RCSendFirst.With(ib.UC) is UCSendFirst. Not every combination is [Opcode.Valid].
func (o Opcode) With(t ib.Transport) Opcode { return o.Operation() | serviceBits(t) }

func serviceBits(t ib.Transport) Opcode {
	if t == ib.UD {
		return 0x60
	}
	return Opcode(t&3) << 5 // RC 0, UC 1, RD 2
}

// Operation returns o with the service bits cleared: the RC opcode of the same
// operation.
func (o Opcode) Operation() Opcode { return o & 0x1f }

// Transport returns the service that o belongs to, false if it is none of RC,
// UC and UD (a CNP, or not valid).
func (o Opcode) Transport() (ib.Transport, bool) {
	if !o.Valid() {
		return 0, false
	}
	switch o >> 5 {
	case 0:
		return ib.RC, true
	case 1:
		return ib.UC, true
	case 3:
		return ib.UD, true
	}
	return 0, false
}

// Valid reports whether o is an opcode that this package can parse.
func (o Opcode) Valid() bool { return opTable[o]&opValid != 0 }

// IsFirst reports whether o is the first of several packets of a message.
func (o Opcode) IsFirst() bool { return opTable[o]&opFirst != 0 }

// IsMiddle reports whether o is neither the first nor the last of its message.
func (o Opcode) IsMiddle() bool { return opTable[o]&opMiddle != 0 }

// IsLast reports whether o is the last of several packets of a message.
func (o Opcode) IsLast() bool { return opTable[o]&opLast != 0 }

// IsOnly reports whether o is a whole message in one packet.
func (o Opcode) IsOnly() bool { return opTable[o]&opOnly != 0 }

// Starts reports whether o begins a message: first or only.
func (o Opcode) Starts() bool { return opTable[o]&(opFirst|opOnly) != 0 }

// Ends reports whether o ends a message: last or only.
func (o Opcode) Ends() bool { return opTable[o]&(opLast|opOnly) != 0 }

// IsSend reports whether o is a part of a SEND of any kind.
func (o Opcode) IsSend() bool { return opTable[o]&opSend != 0 }

// IsWrite reports whether o is a part of an RDMA WRITE.
func (o Opcode) IsWrite() bool { return opTable[o]&opWrite != 0 }

// IsReadRequest reports whether o is an RDMA READ request.
func (o Opcode) IsReadRequest() bool { return o == RCReadRequest }

// IsReadResponse reports whether o is a part of an RDMA READ response.
func (o Opcode) IsReadResponse() bool { return opTable[o]&opReadResponse != 0 }

// IsAck reports whether o is an RC acknowledge, positive or negative.
func (o Opcode) IsAck() bool { return o == RCAck }

// IsResponse reports whether o goes from responder to requester: an
// acknowledge or a read or atomic response.
func (o Opcode) IsResponse() bool { return o == RCAck || o == RCAtomicAck || o.IsReadResponse() }

// HasImm reports whether an ImmDt follows.
func (o Opcode) HasImm() bool { return opTable[o]&opImm != 0 }

// HasInv reports whether an IETH follows.
func (o Opcode) HasInv() bool { return opTable[o]&opInv != 0 }

// HasDETH reports whether a DETH follows.
func (o Opcode) HasDETH() bool { return opTable[o]&opDETH != 0 }

// HasAETH reports whether an AETH follows.
func (o Opcode) HasAETH() bool { return opTable[o]&opAETH != 0 }

// HasRETH reports whether a RETH follows.
func (o Opcode) HasRETH() bool { return opTable[o]&opRETH != 0 }

// HeaderLen returns the octets of BTH and all extension headers, 0 if o is not
// valid.
func (o Opcode) HeaderLen() int { return int(opHeaderLen[o]) }

// String prints service and operation: "RC SEND_FIRST".
func (o Opcode) String() string {
	if o == CNP {
		return "CNP"
	}
	t, ok := o.Transport()
	if !ok {
		return fmt.Sprintf("Opcode(0x%02x)", uint8(o))
	}
	return t.String() + " " + operationNames[o.Operation()]
}

var operationNames = [32]string{
	RCSendFirst: "SEND_FIRST", RCSendMiddle: "SEND_MIDDLE", RCSendLast: "SEND_LAST", RCSendLastImm: "SEND_LAST_IMM",
	RCSendOnly: "SEND_ONLY", RCSendOnlyImm: "SEND_ONLY_IMM",
	RCWriteFirst: "WRITE_FIRST", RCWriteMiddle: "WRITE_MIDDLE", RCWriteLast: "WRITE_LAST",
	RCWriteLastImm: "WRITE_LAST_IMM", RCWriteOnly: "WRITE_ONLY", RCWriteOnlyImm: "WRITE_ONLY_IMM",
	RCReadRequest: "READ_REQUEST", RCReadResponseFirst: "READ_RESPONSE_FIRST",
	RCReadResponseMiddle: "READ_RESPONSE_MIDDLE", RCReadResponseLast: "READ_RESPONSE_LAST",
	RCReadResponseOnly: "READ_RESPONSE_ONLY", RCAck: "ACK", RCAtomicAck: "ATOMIC_ACK",
	RCCompareSwap: "COMPARE_SWAP", RCFetchAdd: "FETCH_ADD", RCSendLastInv: "SEND_LAST_INV", RCSendOnlyInv: "SEND_ONLY_INV",
}
