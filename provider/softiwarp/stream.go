package softiwarp

import (
	"errors"
	"io"
	"net"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/mpa"
)

// lingerTimeout bounds the end of a stream: for so long octets of the peer are read and
// thrown away, so that TCP delivers what we have sent before it is closed.
const lingerTimeout = time.Second

// A Stream is an MPA connection whose startup frames are done. It carries DDP segments. A
// responder's is fenced at first, see [Stream.Fenced]. Once a Stream is not fenced, one
// goroutine may read while another writes.
type Stream struct {
	// Result is what was agreed on. At a responder the kind of RTR indication is known when
	// the stream is no longer fenced.
	Result mpa.Result

	conn  net.Conn
	terms *atomic.Uint64 // of the Startup
	in    mpa.Deframer
	out   mpa.Framer
	mulp  int // largest ULPDU that is sent, octets
	rtr   mpa.RTRTypes
	early []byte // arrived behind the last startup frame

	responder *mpa.Responder // while fenced
	s         *Startup       // the responder's

	rbuf []byte
	rest []byte // of rbuf: read and not looked at
	wbuf []byte
}

func newStream(conn net.Conn, res mpa.Result) *Stream {
	return &Stream{Result: res, conn: conn, in: mpa.Deframer{Markers: res.RecvMarkers, CRC: res.CRC},
		out: mpa.Framer{Markers: res.SendMarkers, CRC: res.CRC}, mulp: mpa.MULPDU(emss(conn), res.SendMarkers)}
}

// Conn returns the connection below.
func (s *Stream) Conn() net.Conn { return s.conn }

// Fenced reports whether this is a responder's stream and the initiator's first segment has not
// been read. Until then nothing may be sent (MPA fencing).
func (s *Stream) Fenced() bool { return s.responder != nil }

// MULPDU returns the largest ULPDU that is sent, in octets.
func (s *Stream) MULPDU() int { return s.mulp }

func (s *Stream) sendRTR(t mpa.RTRTypes) error { return s.write(mpa.AppendRTR(nil, t), nil) }

// write sends one FPDU.
func (s *Stream) write(head, body []byte) error {
	s.wbuf = s.out.Append(s.wbuf[:0], head, body)
	_ = s.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := s.conn.Write(s.wbuf)
	_ = s.conn.SetWriteDeadline(time.Time{})
	return err
}

// Write sends a segment, alone in its FPDU. The payload is at most MULPDU less
// the header. While the stream is fenced it fails.
func (s *Stream) Write(seg *mpa.Segment) error {
	if s.Fenced() {
		return ErrFenced
	}
	return s.write(seg.AppendHeader(nil), seg.Payload)
}

// ErrFenced says that a responder may not send yet.
var ErrFenced = errors.New("softiwarp: the initiator has sent nothing yet")

// Read returns the next segment. It stays valid until the next Read. rtr reports whether the
// segment is the RTR indication, which is no message of the peer's ULP. Errors are [*mpa.Error] and
// [*mpa.TermError] for faults of the peer, io.EOF if it closed between two FPDUs, or those of the
// net.Conn.
func (s *Stream) Read() (seg mpa.Segment, rtr bool, err error) {
	if s.responder != nil && s.Result.PeerToPeer { // else a deadline is the user's
		_ = s.conn.SetReadDeadline(s.responder.Deadline())
	}
	u, err := s.next()
	if err != nil {
		return seg, false, s.faulty(err)
	}
	seg, terr := mpa.ParseSegment(u)
	if terr != nil {
		return seg, false, s.faulty(terr)
	}
	if s.responder == nil {
		return seg, false, nil
	}
	return s.first(seg)
}

// first passes the initiator's first segment to the machine.
func (s *Stream) first(seg mpa.Segment) (mpa.Segment, bool, error) {
	for _, act := range s.responder.Step(nil, time.Now(), mpa.FPDU{Segment: seg}) {
		switch act := act.(type) {
		case mpa.Established:
			s.Result = act.Result
			s.unfence()
			return seg, act.Result.RTR != 0, nil
		case mpa.SendTerminate:
			s.terminate(act.Code.Cause())
		case mpa.Failed:
			s.unfence()
			return seg, false, act.Err
		}
	}
	return seg, false, errors.New("softiwarp: the machine does not know what to do") // cannot happen
}

func (s *Stream) unfence() {
	s.s.counted(s.responder.Counters())
	s.responder = nil
	if s.Result.PeerToPeer {
		_ = s.conn.SetReadDeadline(time.Time{})
	}
}

// faulty returns the error of Read for err. On a fenced stream a fault of an FPDU or a segment ends
// the fence. Any other error goes to the machine, which ends the fence, unless the deadline that
// has passed is the user's and not the machine's.
func (s *Stream) faulty(err error) error {
	if s.responder == nil {
		return err
	}
	var (
		ev    mpa.Event = mpa.PeerClosed{Err: err}
		bad   *mpa.Error
		term  *mpa.TermError
		timer net.Error
	)
	switch {
	case errors.As(err, &bad): // the machine has not seen it
		s.responder.Counters()[bad.Reason]++
		s.unfence()
		return err
	case errors.As(err, &term):
		s.unfence()
		return err
	case errors.As(err, &timer) && timer.Timeout():
		ev = mpa.Wake{}
	}
	for _, act := range s.responder.Step(nil, time.Now(), ev) {
		if f, ok := act.(mpa.Failed); ok {
			s.unfence()
			return f.Err
		}
	}
	return err
}

// readLen is how many octets are asked of TCP at a time.
const readLen = 1 << 16

// next returns the next ULPDU.
func (s *Stream) next() ([]byte, error) {
	for {
		if len(s.early) > 0 {
			s.rest, s.early = s.early, nil
		}
		u, rest, ok, err := s.in.Next(s.rest)
		s.rest = rest
		if err != nil {
			return nil, err
		}
		if ok {
			return u, nil
		}
		if s.rbuf == nil {
			s.rbuf = make([]byte, readLen)
		}
		k, rerr := s.conn.Read(s.rbuf)
		s.rest = s.rbuf[:k]
		switch {
		case k > 0:
		case errors.Is(rerr, io.EOF) && s.in.Partial():
			return nil, io.ErrUnexpectedEOF
		case rerr != nil:
			return nil, rerr
		}
	}
}

// Terminate sends a Terminate and ends the stream. A fenced stream is only closed.
func (s *Stream) Terminate(c mpa.Cause) {
	if !s.Fenced() {
		s.terminate(c)
	}
	s.Close()
}

func (s *Stream) terminate(c mpa.Cause) {
	if s.terms != nil {
		s.terms.Add(1)
	}
	_ = s.write(mpa.AppendTerminate(nil, c), nil) // the end is the same if it does not arrive
}

// Close ends the stream gracefully: what was sent arrives. It takes a second if
// the peer does not close too.
func (s *Stream) Close() { linger(s.conn) }

// linger closes conn in such a way that the peer gets what was sent: TCP would throw that
// away if octets of the peer were unread.
func linger(conn net.Conn) {
	defer conn.Close()
	half, ok := conn.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		return
	}
	// A timer and not a deadline: a reader may still set deadlines of its own.
	defer time.AfterFunc(lingerTimeout, func() { _ = conn.Close() }).Stop()
	_ = conn.SetReadDeadline(time.Time{}) // one that has passed has ended the reader
	var b [4096]byte
	for {
		if _, err := conn.Read(b[:]); err != nil {
			return
		}
	}
}

// defaultEMSS is the maximum segment size in octets if the kernel reports none, as for connections
// other than TCP.
const defaultEMSS = 16384

// emss returns the largest segment of TCP in octets, defaultEMSS where it is not known.
func emss(conn net.Conn) int {
	if t, ok := conn.(*net.TCPConn); ok {
		if raw, err := t.SyscallConn(); err == nil {
			n := 0
			_ = raw.Control(func(fd uintptr) { n, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG) })
			if err == nil && n > 0 {
				return n
			}
		}
	}
	return defaultEMSS
}
