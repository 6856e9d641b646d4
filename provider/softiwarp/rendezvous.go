package softiwarp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"ipoibcm/ib"
	"ipoibcm/mpa"
	"ipoibcm/verbs"
)

// In verbs the users give each of two queue pairs the GID and QPN of the other. The two must then
// get one TCP connection. The queue pair with the smaller GID dials; of two with one GID, that with
// the smaller QPN. The private data of its request names both queue pairs. The other device holds
// the request until its queue pair is in RTR, for ConnectTimeout at most. Only Devices know this
// arrangement. Foreign peers need [Device.Connect] and [Device.Accept].

// rendezvousMagic begins the private data: "iQPr".
const rendezvousMagic = 0x69515072

const rendezvousLen = 4 + 4 + 4 + 16 + 16

// A meeting names two queue pairs: the one that dials, and the one it wants. It is
// comparable.
type meeting struct {
	from, to   ib.QPN
	fromG, toG ib.GID
}

func (m meeting) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, rendezvousMagic)
	b = binary.BigEndian.AppendUint32(b, uint32(m.from))
	b = binary.BigEndian.AppendUint32(b, uint32(m.to))
	return append(append(b, m.fromG[:]...), m.toG[:]...)
}

func (m *meeting) unmarshal(b []byte) bool {
	if len(b) != rendezvousLen || binary.BigEndian.Uint32(b) != rendezvousMagic {
		return false
	}
	m.from, m.to = ib.QPN(binary.BigEndian.Uint32(b[4:])), ib.QPN(binary.BigEndian.Uint32(b[8:]))
	copy(m.fromG[:], b[12:])
	copy(m.toG[:], b[28:])
	return true
}

// A visitor is a request that waits for its queue pair.
type visitor struct {
	enter chan *qp // holds one
}

// rendezvous begins to connect q as attr says. The lock is held.
func (q *qp) rendezvous(attr *verbs.QPAttr) error {
	d := q.dev
	if attr.Path.DGID.IsZero() || !attr.DestQPN.Valid() {
		return fmt.Errorf("%w: a connection needs a GID and a QPN", verbs.ErrInvalid)
	}
	q.local, q.remote, q.remoteQPN = attr.Path.SGID, attr.Path.DGID, attr.DestQPN
	q.ird = attr.MaxDestRDAtomic
	if q.local.IsZero() {
		q.local = d.gid
	}
	if q.local != d.gid {
		return fmt.Errorf("%w: GID %v is not ours", verbs.ErrInvalid, q.local)
	}
	switch c := bytes.Compare(q.local[:], q.remote[:]); {
	case c == 0 && q.qpn == q.remoteQPN:
		return fmt.Errorf("%w: a queue pair cannot be connected to itself", verbs.ErrInvalid)
	case c < 0 || c == 0 && q.qpn < q.remoteQPN:
		ctx, cancel := context.WithCancelCause(d.ctx)
		try := &attempt{cancel}
		q.settle = try
		m := meeting{q.qpn, q.remoteQPN, q.local, q.remote}
		ird := q.ird
		d.wg.Go(func() {
			st, _, err := d.visit(ctx, m, ird)
			q.arrived(try, st, err, true)
		})
	default:
		d.mu.Lock()
		if v := d.visitors[meeting{q.remoteQPN, q.qpn, q.remote, q.local}]; v != nil {
			v.enter <- q // enter holds one, and a visitor is given no more
			delete(d.visitors, meeting{q.remoteQPN, q.qpn, q.remote, q.local})
		}
		d.mu.Unlock()
	}
	return nil
}

// startup returns how two Devices settle a connection.
func (d *Device) startup(ird, ord uint8) Startup {
	s := Startup{Options: d.opts.MPA, Count: d.counted(nil), terms: &d.count.termsOut}
	s.Options.Negotiate, s.Options.PeerToPeer, s.Options.Fallback = true, true, false
	s.Options.Depths = mpa.Depths{IRD: mpa.Depth(ird), ORD: mpa.Depth(ord), MaxIRD: mpa.Depth(ird)}
	return s
}

// visit connects to the peer's device. As long as nothing listens there it dials again,
// until ConnectTimeout is over.
func (d *Device) visit(ctx context.Context, m meeting, ird uint8) (*Stream, mpa.Result, error) {
	s := d.startup(ird, maxReads)
	s.Private = m.append(nil)
	s.Options.Timeout = d.opts.connectTimeout() + time.Second // the other side gives up first
	end := time.Now().Add(d.opts.connectTimeout())
	for {
		st, res, err := s.Connect(ctx, func(ctx context.Context) (net.Conn, error) { return d.dial(ctx, m.fromG, m.toG) })
		if err == nil || ctx.Err() != nil || !errors.Is(err, syscall.ECONNREFUSED) || time.Now().After(end) {
			return st, res, err
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// arrived ends the attempt try: q gets the stream st, or goes to ERR because of err.
func (q *qp) arrived(try *attempt, st *Stream, err error, initiator bool) {
	try.cancel(nil)
	q.mu.Lock()
	defer q.mu.Unlock()
	mine := q.endAttempt(try)
	switch {
	case !mine:
		if st != nil {
			q.dev.wg.Go(st.Close)
		}
	case err != nil:
		q.dev.count.connectErrors.Add(1)
		q.fail(verbs.RetryExceeded, err.Error(), nil)
	default:
		q.attach(st, initiator)
	}
}

// endAttempt reports whether try is still the attempt that q waits for. If it is, endAttempt
// removes it. The caller holds q.mu.
func (q *qp) endAttempt(try *attempt) (mine bool) {
	if mine = q.settle == try; mine {
		q.settle = nil
	}
	return mine
}

// listen takes connections from the peers' devices.
func (d *Device) listen() {
	for {
		conn, err := d.ln.Accept()
		if err != nil {
			if d.ctx.Err() != nil {
				return
			}
			d.count.acceptErrors.Add(1)
			select { // out of files, perhaps
			case <-d.ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		select {
		case d.guests <- struct{}{}:
			d.wg.Go(func() {
				defer func() { <-d.guests }()
				d.receive(conn)
			})
		default:
			d.count.guestsRefused.Add(1)
			_ = conn.Close()
		}
	}
}

// receive answers one request.
func (d *Device) receive(conn net.Conn) {
	var q *qp
	var try *attempt
	s := d.startup(0, 0)
	st, _, err := s.Accept(d.ctx, conn, func(ctx context.Context, r mpa.Request) mpa.Event {
		var m meeting
		if !m.unmarshal(r.Private) || m.toG != d.gid || !from(conn, m.fromG) {
			d.count.unknownSources.Add(1)
			return mpa.Reject{}
		}
		var ird uint8
		if q, try, ird = d.host(ctx, m); q == nil {
			d.count.nobodyHome.Add(1)
			return mpa.Reject{}
		}
		return mpa.Accept{Depths: &mpa.Depths{IRD: mpa.Depth(ird), MaxIRD: mpa.Depth(ird), ORD: maxReads}}
	})
	if q != nil {
		q.arrived(try, st, err, false)
	}
}

// from reports whether conn comes from the address of gid. A connection without a TCP
// address passes.
func from(conn net.Conn, gid ib.GID) bool {
	a, ok := conn.RemoteAddr().(*net.TCPAddr)
	return !ok || ib.GIDFromAddr(a.AddrPort().Addr()) == gid
}

// host returns the queue pair that m wants, and waits for it up to ConnectTimeout. It returns nil
// if the queue pair does not come, or if an equal request waits already.
func (d *Device) host(ctx context.Context, m meeting) (*qp, *attempt, uint8) {
	v := &visitor{enter: make(chan *qp, 1)}
	d.mu.Lock()
	if d.visitors[m] != nil {
		d.mu.Unlock()
		return nil, nil, 0
	}
	d.visitors[m] = v
	q := d.qps[m.to]
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		if d.visitors[m] == v {
			delete(d.visitors, m)
		}
		d.mu.Unlock()
	}()
	if q != nil { // one that comes to RTR from here on finds v
		if try, ird := q.claim(m); try != nil {
			return q, try, ird
		}
	}
	select {
	case q := <-v.enter:
		if try, ird := q.claim(m); try != nil {
			return q, try, ird
		}
	case <-time.After(d.opts.connectTimeout()):
	case <-ctx.Done():
	}
	return nil, nil, 0
}

// claim takes q for the request m, if q waits for that request.
func (q *qp) claim(m meeting) (*attempt, uint8) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.gone || q.sess != nil || q.settle != nil || q.state != verbs.StateRTR && q.state != verbs.StateRTS ||
		m != (meeting{q.remoteQPN, q.qpn, q.remote, q.local}) {
		return nil, 0
	}
	q.settle = &attempt{func(error) {}}
	return q.settle, q.ird
}
