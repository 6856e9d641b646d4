package simfabric

import (
	"cmp"
	"slices"

	"ipoibcm/ib"
	"ipoibcm/provider/softroce/engine"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// madPort is a Port as [verbs.MADPort]: QP 1.
type madPort Port

// SendMAD implements [verbs.MADPort].
func (m *madPort) SendMAD(mad *verbs.MAD) error {
	p := (*Port)(m)
	if p.closed {
		return verbs.ErrClosed
	}
	attr := p.complete(verbs.AHAttr{SGID: mad.Local, DGID: mad.Remote})
	if attr.DGID.IsZero() || attr.DGID.Is4() != attr.SGID.Is4() {
		return verbs.ErrInvalid
	}
	pkey := cmp.Or(mad.PKey, p.opts.PKeys[0])
	b := make([]byte, roce.BTHLen+roce.DETHLen, roce.BTHLen+roce.DETHLen+verbs.MADLen)
	roce.PutBTH(b, roce.BTHFields{Opcode: roce.UDSendOnly, PKey: pkey, DestQPN: mad.QPN})
	roce.PutDETH(b[roce.BTHLen:], ib.QKeyGSI, ib.QPNGSI)
	p.send(header(&attr, ib.QPNGSI, mad.QPN), append(b, mad.Data[:]...))
	return nil
}

// MADs implements [verbs.MADPort].
func (m *madPort) MADs() <-chan *verbs.MAD { return m.mads }

func (p *Port) inputMAD(pkt *roce.Packet, src *engine.Source) {
	if !slices.ContainsFunc(p.opts.PKeys, pkt.BTH.PKey().Match) || !pkt.Op.HasDETH() || pkt.DETH().QKey() != ib.QKeyGSI || len(pkt.Payload) != verbs.MADLen {
		p.count.badPacket++
		return
	}
	mad := &verbs.MAD{Remote: src.Src, Local: src.Dst, QPN: pkt.DETH().SrcQPN(), PKey: pkt.BTH.PKey(),
		Data: [verbs.MADLen]byte(pkt.Payload)}
	select {
	case p.mads <- mad:
		p.tell()
	default:
		p.count.madDrops++
	}
}
