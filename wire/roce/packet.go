package roce

import (
	"encoding/binary"

	"ipoibcm/wire"
)

// A Packet is a parsed UDP payload: views on its octets, which it does not own.
type Packet struct {
	BTH     BTH
	Op      Opcode
	Payload []byte // without pad
	Covered []byte // BTH through pad: all that precedes the ICRC
	ICRC    ICRC   // as received, not checked
}

// Parse sets p from the payload of one UDP datagram without copying. It checks
// opcode, transport version and lengths, but neither the ICRC nor any key. It
// allocates only to report an error.
func (p *Packet) Parse(b []byte) error {
	if len(b) < BTHLen+ICRCLen {
		return &wire.ShortError{What: "RoCE packet", Need: BTHLen + ICRCLen, Have: len(b)}
	}
	h := BTH(b[:BTHLen])
	op := h.Opcode()
	n := op.HeaderLen()
	if n == 0 {
		return &wire.FieldError{What: "BTH", Field: "opcode", Value: uint64(op)}
	}
	if v := h.Version(); v != 0 {
		return &wire.FieldError{What: "BTH", Field: "transport version", Value: uint64(v)}
	}
	pad := h.Pad()
	if need := n + pad + ICRCLen; len(b) < need {
		return &wire.ShortError{What: "RoCE packet", Need: need, Have: len(b)}
	}
	if len(b)&3 != 0 {
		return &wire.FieldError{What: "RoCE packet", Field: "length", Value: uint64(len(b))}
	}
	end := len(b) - ICRCLen
	*p = Packet{
		BTH: h, Op: op, Payload: b[n : end-pad], Covered: b[:end],
		ICRC: ICRC(binary.LittleEndian.Uint32(b[end:])),
	}
	return nil
}

// DETH returns the DETH, nil if the opcode has none.
func (p *Packet) DETH() DETH {
	if !p.Op.HasDETH() {
		return nil
	}
	return DETH(p.Covered[BTHLen : BTHLen+DETHLen])
}

// AETH returns the AETH, nil if the opcode has none.
func (p *Packet) AETH() AETH {
	if !p.Op.HasAETH() {
		return nil
	}
	return AETH(p.Covered[BTHLen : BTHLen+AETHLen])
}

// RETH returns the RETH, nil if the opcode has none.
func (p *Packet) RETH() RETH {
	if !p.Op.HasRETH() {
		return nil
	}
	return RETH(p.Covered[BTHLen : BTHLen+RETHLen])
}

// ImmDt returns the immediate data, nil if the opcode has none. It is the last
// of the extension headers.
func (p *Packet) ImmDt() ImmDt {
	if !p.Op.HasImm() {
		return nil
	}
	n := p.Op.HeaderLen()
	return ImmDt(p.Covered[n-ImmDtLen : n])
}

// IETH returns the IETH, nil if the opcode has none.
func (p *Packet) IETH() IETH {
	if !p.Op.HasInv() {
		return nil
	}
	return IETH(p.Covered[BTHLen : BTHLen+IETHLen])
}
