package softroce

import (
	"sync"
	"sync/atomic"
	"time"

	"ipoibcm/ib"
	"ipoibcm/provider/softroce/engine"
	"ipoibcm/ratelimit"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/roce"
)

// madQueue bounds the MADs that wait for the reader of MADs.
const madQueue = 256

// A gsi is the port's QP 1. A MAD is one UD packet, so QP 1 needs no machine of the engine.
type gsi struct {
	dev *Device
	in  chan *verbs.MAD
	psn atomic.Uint32

	mu            sync.Mutex // guards asks and answers: several sockets may receive
	asks, answers *ratelimit.Limiter
}

// The MADs that QP 1 takes per second. askRate is for messages that begin something: each
// may cost a connection, or at least an answer. answerRate is for messages that answer.
var (
	askRate    = ratelimit.Options{Unknown: 64, Returning: 1024, Source: 64}
	answerRate = ratelimit.Options{Unknown: 1024, Returning: 2048, Source: 256}
)

func newGSI(d *Device) *gsi {
	next := func(o ratelimit.Options) *ratelimit.Limiter {
		return ratelimit.New(o, [2]uint64{random64(), random64()})
	}
	return &gsi{dev: d, in: make(chan *verbs.MAD, madQueue), asks: next(askRate), answers: next(answerRate)}
}

var _ verbs.MADPort = (*gsi)(nil)

// MADs implements [verbs.MADPort].
func (g *gsi) MADs() <-chan *verbs.MAD { return g.in }

// SendMAD implements [verbs.MADPort].
func (g *gsi) SendMAD(m *verbs.MAD) error {
	d := g.dev
	if d.closing.Load() {
		return verbs.ErrClosed
	}
	attr := verbs.AHAttr{SGID: m.Local, DGID: m.Remote}
	p, err := d.newPath(attr, true, ib.QPNGSI, m.QPN)
	if err != nil {
		return err
	}
	pkey := m.PKey
	if pkey == 0 {
		pkey = d.pkeys[0]
	}
	var pkt engine.Packet
	roce.PutBTH(pkt.Header[:], roce.BTHFields{
		Opcode: roce.UDSendOnly, PKey: pkey, DestQPN: m.QPN, PSN: ib.PSN(g.psn.Add(1)) & ib.PSNMask,
	})
	roce.PutDETH(pkt.Header[roce.BTHLen:], ib.QKeyGSI, ib.QPNGSI)
	pkt.HeaderLen = roce.BTHLen + roce.DETHLen
	pkt.Payload[0], pkt.NPayload, pkt.PayloadLen = m.Data[:], 1, verbs.MADLen
	p.sendUD([]engine.Packet{pkt})
	d.count.madsOut.Add(1)
	return nil
}

// receive handles a packet to QP 1.
func (g *gsi) receive(p *roce.Packet, src, dst ib.GID, now time.Time) {
	d := g.dev
	c := &d.count
	deth := p.DETH()
	switch {
	case p.Op != roce.UDSendOnly || len(p.Payload) != verbs.MADLen:
		c.rxMalformed.Add(1)
		return
	case deth.QKey() != ib.QKeyGSI:
		c.rxDrops[engine.DropQKey].Add(1)
		return
	case !d.matchPKey(p.BTH.PKey()):
		c.rxDrops[engine.DropPKey].Add(1)
		return
	case !d.opts.NoLimits && !g.allow(p.Payload, src, now):
		c.madsFlood.Add(1)
		return
	}
	m := &verbs.MAD{Remote: src, Local: dst, QPN: deth.SrcQPN(), PKey: p.BTH.PKey()}
	copy(m.Data[:], p.Payload)
	select {
	case g.in <- m:
		c.madsIn.Add(1)
	default:
		c.madsDropped.Add(1)
	}
}

// allow reports whether the MAD b from src is within the rates.
func (g *gsi) allow(b []byte, src ib.GID, now time.Time) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if mad.Asks(b) {
		return g.asks.Allow(now.UnixNano(), src)
	}
	return g.answers.Allow(now.UnixNano(), src)
}
