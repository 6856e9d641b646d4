package engine

import (
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

const (
	// cnpEvery is how often a queue pair sends a CNP at most; adapters do alike.
	cnpEvery = 50 * time.Microsecond
	// cnpReserved is what follows the BTH of a CNP (RoCEv2 annex A17, 17.9.3).
	cnpReserved = 16
	// becn is the bit of the BTH that a CNP has set.
	becn = 0x40
)

// marked takes in that a packet of the connection was marked on its way. The message
// that ends next says so too.
func (q *QP) marked(now time.Time) {
	r := &q.rsp
	q.count.Marked++
	r.ce = true
	if q.cfg.Transport == ib.RC && now.Sub(r.cnpAt) >= cnpEvery {
		r.cnpPending, r.cnpAt = true, now
	}
}

// nextCNP puts a CNP into p, if one is pending.
func (q *QP) nextCNP(p *Packet) bool {
	r := &q.rsp
	if !r.cnpPending {
		return false
	}
	r.cnpPending = false
	roce.PutBTH(p.Header[:], roce.BTHFields{Opcode: roce.CNP, PKey: q.attr.PKey, DestQPN: q.attr.DestQPN})
	p.Header[4] |= becn
	clear(p.Header[roce.BTHLen : roce.BTHLen+cnpReserved])
	p.HeaderLen, p.Pad, p.NPayload, p.PayloadLen, p.AH = roce.BTHLen+cnpReserved, 0, 0, 0, nil
	q.count.CNPsOut++
	q.count.PacketsOut++
	return true
}

// receiveCNP takes a CNP: packets of ours were marked.
func (q *QP) receiveCNP(from *Source, now time.Time) DropReason {
	switch {
	case q.cfg.Transport != ib.RC:
		return DropOpcode
	case from.Src != q.attr.Path.DGID || (from.Dst != q.attr.Path.SGID && !q.attr.Path.SGID.IsZero()):
		return DropSource
	case q.state != verbs.StateRTS:
		return DropStale
	}
	q.count.CNPsIn++
	q.req.cc.notification(now)
	q.req.limit = min(q.req.limit, q.flight())
	return NoDrop
}

// Silent reports whether nothing has been heard for several timeouts in a row.
func (q *QP) Silent() bool { return q.req.backoff >= 2 }
