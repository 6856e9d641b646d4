package main

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"ipoibcm/control"
	"ipoibcm/mpa"
	"ipoibcm/provider/softiwarp"
)

func newProbe() *cobra.Command {
	cmd := &cobra.Command{Use: "probe", Short: "set up one connection with a peer and tell what was agreed",
		Example: "  ipoibcmd probe mpa 192.0.2.7:7174 --peer-to-peer\n  ipoibcmd probe rpcrdma 192.0.2.7:20049"}
	cmd.AddCommand(newProbeMPA(), newProbeRPC())
	return cmd
}

// mpaProbe is one run of "probe mpa".
type mpaProbe struct {
	listen, asJSON, reject bool
	opts                   mpa.Options
	ird, ord, private, rtr string
	timeout, hold          time.Duration

	out  control.MPAProbe
	data []byte // private data
	in   []byte // octets of the peer's startup frame
}

const mpaLong = `Set up one MPA connection (RFC 5044, RFC 6581) with HOST:PORT, or take one with
--listen, tell what was asked, answered and settled, and end it.

Exit status: 0 established, 1 rejected or failed, 2 used wrongly.`

func newProbeMPA() *cobra.Command {
	p := &mpaProbe{}
	cmd := &cobra.Command{
		Use:   "mpa HOST:PORT",
		Short: "iWARP connection set-up: revision, IRD, ORD, RTR indication",
		Long:  mpaLong,
		Example: `  ipoibcmd probe mpa 192.0.2.7:7174 --peer-to-peer
  ipoibcmd probe mpa 192.0.2.7:20049 --private-data f6ab0e1801010303 --json
  ipoibcmd probe mpa --listen :7174 --crc --ird 8 --ord 8`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := p.parse(cmd, args[0]); err != nil {
				return usageError{hintError{err, "see: " + cmd.CommandPath() + " --help"}}
			}
			return p.run(cmd.Context(), args[0])
		},
	}
	f := cmd.Flags()
	f.BoolVar(&p.listen, "listen", false, "take one connection at HOST:PORT instead, as responder")
	f.BoolVar(&p.asJSON, "json", false, "print JSON")
	f.Uint8Var(&p.opts.Revision, "revision", 0, "1: speak only that; 2: send it even if nothing is enhanced; 0: as needed")
	f.BoolVar(&p.opts.PeerToPeer, "peer-to-peer", false, "initiator: ask for the peer-to-peer model (flag A)")
	f.BoolVar(&p.opts.Negotiate, "negotiate", true, "initiator: negotiate IRD and ORD (off with --revision 1)")
	f.StringVar(&p.ird, "ird", "16", "inbound RDMA Reads at a time, or \"ulp\" for 0x3FFF")
	f.StringVar(&p.ord, "ord", "16", "outbound RDMA Reads at a time, or \"ulp\" for 0x3FFF")
	f.Uint16Var((*uint16)(&p.opts.MaxIRD), "max-ird", 0, "IRD that can be provided if the peer needs it (default --ird)")
	f.Uint16Var((*uint16)(&p.opts.MinORD), "need-ord", 0, "responder: reject an initiator whose IRD is less")
	f.BoolVar(&p.opts.StrictIRD, "strict-ird", false, "responder: reject an initiator that asks for more than --max-ird")
	f.StringVar(&p.rtr, "rtr", "send,write,read", "kinds of RTR indication that are supported")
	f.BoolVar(&p.opts.Markers, "markers", false, "ask for markers in what is received (M)")
	f.BoolVar(&p.opts.CRC, "crc", false, "ask for CRCs (C)")
	f.StringVar(&p.private, "private-data", "", "private data in hexadecimal, or text: and text")
	f.BoolVar(&p.opts.Fallback, "fallback", false,
		"initiator: try again unenhanced where an enhanced request is met by a close")
	f.BoolVar(&p.reject, "reject", false, "responder: reject the request")
	f.DurationVar(&p.timeout, "timeout", 10*time.Second,
		"bound on each wait: for TCP, for the startup frame, for the RTR indication")
	f.DurationVar(&p.hold, "hold", 200*time.Millisecond, "how long to look for a message of the peer before ending")
	return cmd
}

// parse makes options of the flags.
func (p *mpaProbe) parse(cmd *cobra.Command, addr string) (err error) {
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return fmt.Errorf("%q is not HOST:PORT", addr)
	}
	depth := func(name, s string, d *mpa.Depth, ulp *bool) error {
		if s == "ulp" {
			*ulp = true
			*d = 16
			return nil
		}
		n, err := strconv.ParseUint(s, 0, 16)
		if err != nil || mpa.Depth(n) > mpa.MaxDepth {
			return fmt.Errorf("--%s %s: want 0 to %d, or ulp", name, s, mpa.MaxDepth)
		}
		*d = mpa.Depth(n)
		return nil
	}
	if err := errors.Join(depth("ird", p.ird, &p.opts.IRD, &p.opts.ULPIRD),
		depth("ord", p.ord, &p.opts.ORD, &p.opts.ULPORD)); err != nil {
		return err
	}
	p.opts.RTR = mpa.RTRNone
	for kind := range strings.SplitSeq(p.rtr, ",") {
		t, ok := map[string]mpa.RTRTypes{"send": mpa.RTRSend, "write": mpa.RTRWrite, "read": mpa.RTRRead,
			"none": mpa.RTRNone}[kind]
		if !ok {
			return fmt.Errorf("--rtr %s: want a list of send, write and read", p.rtr)
		}
		p.opts.RTR |= t
	}
	if p.opts.RTR&mpa.RTRAll != 0 {
		p.opts.RTR &= mpa.RTRAll
	}
	if text, ok := strings.CutPrefix(p.private, "text:"); ok {
		p.data = []byte(text)
	} else if p.data, err = hex.DecodeString(p.private); err != nil {
		return fmt.Errorf("--private-data: %w", err)
	}
	if p.opts.Revision == 1 && !cmd.Flags().Changed("negotiate") {
		p.opts.Negotiate = false
	}
	p.opts.Timeout, p.opts.RTRTimeout = p.timeout, p.timeout
	if p.timeout <= 0 {
		return errors.New("--timeout must be above 0")
	}
	if p.listen {
		_, err = mpa.NewResponder(p.opts)
		if n := mpa.MaxULPData(p.opts.Revision != 1); err == nil && len(p.data) > n {
			err = fmt.Errorf("%d octets of private data, at most %d can be sent", len(p.data), n)
		}
	} else {
		_, err = mpa.NewInitiator(p.opts, p.data)
	}
	return err
}

func (p *mpaProbe) run(ctx context.Context, addr string) error {
	p.out = control.MPAProbe{Version: control.Version, Role: "initiator", Outcome: "failed", Frames: []control.MPAFrame{},
		Counters: map[string]uint64{}}
	if len(p.data) > mpa.LinuxPrivateData {
		p.out.Notes = append(p.out.Notes, fmt.Sprintf("%d octets of private data: Linux takes %d at most", len(p.data),
			mpa.LinuxPrivateData))
	}
	s := softiwarp.Startup{Options: p.opts, Private: p.data, Trace: p.trace, Count: p.counted}
	var st *softiwarp.Stream
	var err error
	if p.listen {
		p.out.Role = "responder"
		st, err = p.accept(ctx, &s, addr)
	} else {
		st, _, err = s.Connect(ctx, func(ctx context.Context) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, p.timeout)
			defer cancel()
			conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
			if err == nil {
				p.ends(conn)
			}
			p.in = p.in[:0]
			return conn, err
		})
	}
	if st != nil {
		err = p.look(st)
		p.end(st, err)
	}
	p.judge(err)
	return told(p.asJSON, &p.out, printMPA, err)
}

func (p *mpaProbe) accept(ctx context.Context, s *softiwarp.Startup, addr string) (*softiwarp.Stream, error) {
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	fmt.Fprintf(os.Stderr, "listening on %s\n", ln.Addr())
	conn, err := ln.Accept()
	_ = ln.Close() // one connection
	if err != nil {
		return nil, cmp.Or(context.Cause(ctx), err)
	}
	p.ends(conn)
	st, _, err := s.Accept(ctx, conn, func(context.Context, mpa.Request) mpa.Event {
		if p.reject {
			return mpa.Reject{Private: p.data}
		}
		return mpa.Accept{Private: p.data}
	})
	return st, err
}

func (p *mpaProbe) ends(conn net.Conn) {
	p.out.Local, p.out.Remote = conn.LocalAddr().String(), conn.RemoteAddr().String()
}

// trace collects the startup frames.
func (p *mpaProbe) trace(out bool, b []byte) {
	if out {
		p.frame(true, b)
		return
	}
	p.in = append(p.in, b...)
	if len(p.in) < mpa.FrameHeaderLen {
		return
	}
	n := mpa.FrameHeaderLen + int(p.in[18])<<8 + int(p.in[19])
	if len(p.in) >= n {
		p.frame(false, p.in[:n])
		p.in = p.in[:0]
	}
}

func (p *mpaProbe) frame(sent bool, b []byte) {
	var f mpa.Frame
	if f.UnmarshalBinary(b) != nil {
		return // the error says it
	}
	c := control.MPAFrame{Sent: sent, Kind: either(f.Reply, "reply", "request"), Revision: int(f.Rev),
		Markers: f.Markers, CRC: f.CRC, Reject: f.Reject, Reserved: int(b[16] & 0x0f)}
	if f.S {
		c.Enhanced = &control.MPAEnhanced{PeerToPeer: f.Enhanced.PeerToPeer, RTR: []string{}, IRD: depthOf(f.Enhanced.IRD),
			ORD: depthOf(f.Enhanced.ORD)}
		if f.Enhanced.RTR != 0 {
			c.Enhanced.RTR = strings.Split(f.Enhanced.RTR.String(), "+")
		}
	}
	if len(f.Private) > 0 {
		c.Private = &control.MPAPrivate{Hex: hex.EncodeToString(f.Private), Octets: len(f.Private),
			Meaning: privateMeaning(f.Private)}
	}
	p.out.Frames = append(p.out.Frames, c)
}

func depthOf(d mpa.Depth) *int {
	if d == mpa.DepthULP {
		return nil
	}
	n := int(d)
	return &n
}

// counted adds the counters of c to the output. It may be called more than once.
func (p *mpaProbe) counted(c *mpa.Counters) {
	c.Each(func(name string, v uint64) {
		if v > 0 {
			p.out.Counters[name] += v
		}
	})
}

// look waits for the peer's first message: an RTR indication that is due, else whatever comes within
// p.hold.
func (p *mpaProbe) look(st *softiwarp.Stream) error {
	fenced := st.Fenced()
	if !fenced || !st.Result.PeerToPeer { // else the machine bounds the wait
		enough := time.AfterFunc(p.hold, func() { _ = st.Conn().SetReadDeadline(time.Unix(1, 0)) })
		defer enough.Stop()
	}
	seg, rtr, err := st.Read()
	res := &st.Result
	var fault *mpa.Error
	switch {
	case err == nil && seg.Opcode == mpa.OpTerminate:
		cause, terr := mpa.ParseTerminate(seg.Payload)
		if terr != nil {
			return terr
		}
		p.out.Terminate = cause.String()
		return &terminatedError{cause}
	case err == nil:
		p.out.FirstMessage = seg.String()
		if rtr {
			p.out.FirstMessage = "RTR indication: " + p.out.FirstMessage
		}
	case errors.Is(err, os.ErrDeadlineExceeded):
	case errors.Is(err, io.EOF):
		p.out.Notes = append(p.out.Notes, "the responder closed without a message")
	case errors.As(err, &fault) && fault.Reason == mpa.ReasonClosed && fenced && !res.PeerToPeer:
		p.out.Notes = append(p.out.Notes, "the initiator closed without a message, as a client may")
	default:
		return err
	}
	p.out.Settled = &control.MPASettled{Revision: int(res.Rev), Enhanced: res.Enhanced, PeerToPeer: res.PeerToPeer,
		RTR: res.RTR.String(),
		IRD: int(res.IRD), ORD: int(res.ORD), SendMarkers: res.SendMarkers, RecvMarkers: res.RecvMarkers, CRC: res.CRC,
		MULPDU: st.MULPDU(), Fallback: res.Fallback}
	return nil
}

// end closes the stream. If the peer has made a fault and has not been told, end sends a Terminate.
func (p *mpaProbe) end(st *softiwarp.Stream, err error) {
	var fault *mpa.Error
	var term *mpa.TermError
	switch {
	case errors.As(err, &term):
		st.Terminate(term.Cause)
	case errors.As(err, &fault) && fault.Reason.FPDU() && p.out.Role == "initiator":
		st.Terminate(fault.Code().Cause())
	default:
		st.Close()
	}
}

// A terminatedError is the cause in the peer's Terminate.
type terminatedError struct{ cause mpa.Cause }

func (e *terminatedError) Error() string { return fmt.Sprintf("the peer terminated: %v", e.cause) }

// judge fills in the outcome of the probe.
func (p *mpaProbe) judge(err error) {
	if err == nil {
		p.out.Outcome = "established"
		return
	}
	p.out.Error = err.Error()
	var fault *mpa.Error
	var rejected *softiwarp.RejectError
	var term *mpa.TermError
	var said *terminatedError
	var op *net.OpError
	switch {
	case errors.As(err, &fault):
	case errors.As(err, &rejected):
		p.out.Outcome, fault = "rejected", &mpa.Error{Reason: mpa.ReasonPeerRejected}
	case errors.As(err, &said):
		p.out.Clause = causeClause(said.cause)
		fault = &mpa.Error{Reason: mpa.ReasonTerminated, Cause: said.cause}
	case errors.As(err, &term):
		p.out.Reason, p.out.Clause = "segment", causeClause(term.Cause)
		return
	case errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &op) && (op.Op == "dial" || op.Op == "read"):
		fault = &mpa.Error{Reason: mpa.ReasonClosed} // or there was never a connection
	default: // we cannot listen, or were stopped
		fault = &mpa.Error{Reason: mpa.ReasonLocal}
	}
	p.out.Reason, p.out.Clause = fault.Reason.String(), cmp.Or(p.out.Clause, fault.Reason.Clause())
	if fault.Reason == mpa.ReasonTerminated {
		p.out.Terminate = fault.Cause.String()
	}
	if c := int(fault.Code()); c != 0 {
		p.out.Code = &c
	}
	if fault.Reason.Outcome() == mpa.Refuse {
		p.out.Outcome = "rejected"
	}
	if p.out.Counters[p.out.Reason] == 0 { // found behind the startup frames, or before them
		var c mpa.Counters
		c[fault.Reason]++
		p.counted(&c)
	}
}

// causeClause returns the clause that defines a cause.
func causeClause(c mpa.Cause) string {
	switch {
	case c.Layer() == 0:
		return "RFC 5040 section 4.8"
	case c.Layer() == 1:
		return "RFC 5041 section 7.2"
	case c.Code() < uint8(mpa.CodeLocal):
		return "RFC 5044 section 8"
	}
	return "RFC 6581 section 8"
}

func printMPA(w io.Writer, p *control.MPAProbe) {
	if p.Remote != "" {
		fmt.Fprintf(w, "%s, %s to %s\n", p.Role, p.Local, p.Remote)
	}
	for _, f := range p.Frames {
		fmt.Fprintf(w, "%-8s %-8s revision %d, flags %s\n", f.Kind, either(f.Sent, "sent", "received"), f.Revision,
			mpaFlags(&f))
		verb := either(f.Kind == "reply", "offered", "asked")
		if e := f.Enhanced; e != nil {
			fmt.Fprintf(w, "  %-14s IRD %s, ORD %s, %s\n", verb, depthText(e.IRD), depthText(e.ORD), modelText(e))
		} else {
			fmt.Fprintf(w, "  %-14s nothing: no enhanced data\n", verb)
		}
		if f.Private != nil {
			fmt.Fprintf(w, "  private data   %d octets: %s\n", f.Private.Octets, f.Private.Hex)
			if f.Private.Meaning != "" {
				fmt.Fprintf(w, "                 %s\n", f.Private.Meaning)
			}
		}
	}
	if s := p.Settled; s != nil {
		fmt.Fprintf(w, "settled  IRD %d, ORD %d, %s, RTR %s, markers sent %s, received %s, CRC %s\n", s.IRD, s.ORD,
			either(s.PeerToPeer, "peer-to-peer", "client-server"), s.RTR,
			yesNo(s.SendMarkers), yesNo(s.RecvMarkers), yesNo(s.CRC))
		if s.Fallback {
			fmt.Fprintln(w, "  after a fallback: the enhanced request was met by a close")
		}
	}
	if p.FirstMessage != "" {
		fmt.Fprintf(w, "peer     %s\n", p.FirstMessage)
	}
	for _, n := range p.Notes {
		fmt.Fprintf(w, "note     %s\n", n)
	}
	fmt.Fprintf(w, "outcome  %s\n", p.Outcome)
	if p.Error != "" {
		fmt.Fprintf(w, "  %s\n", p.Error)
		if p.Code != nil {
			fmt.Fprintf(w, "  code %d (layer 2, type 0): %v\n", *p.Code, mpa.Code(*p.Code))
		}
		if p.Clause != "" {
			fmt.Fprintf(w, "  %s\n", p.Clause)
		}
	}
}

func mpaFlags(f *control.MPAFrame) string {
	var l []string
	for _, bit := range []struct {
		on   bool
		name string
	}{{f.Markers, "M"}, {f.CRC, "C"}, {f.Reject, "R"}, {f.Enhanced != nil, "S"}} {
		if bit.on {
			l = append(l, bit.name)
		}
	}
	if f.Reserved != 0 {
		l = append(l, fmt.Sprintf("Res=%#x", f.Reserved))
	}
	if len(l) == 0 {
		return "none"
	}
	return strings.Join(l, " ")
}

func yesNo(b bool) string { return either(b, "yes", "no") }

func depthText(d *int) string {
	if d == nil {
		return "0x3FFF (left to the ULP)"
	}
	return strconv.Itoa(*d)
}

func modelText(e *control.MPAEnhanced) string {
	switch {
	case !e.PeerToPeer && len(e.RTR) > 0:
		return "client-server (A = 0; B, C, D are set and mean nothing)"
	case !e.PeerToPeer:
		return "client-server (A = 0)"
	}
	return "peer-to-peer (A), RTR " + cmp.Or(strings.Join(e.RTR, ", "), "none")
}
