package cm

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/script"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// Who is who in the tests: we are A.
var (
	gidA  = ib.GID{0xfe, 0x80, 15: 0x0a}
	gidB  = ib.GID{0xfe, 0x80, 15: 0x0b}
	gidC  = ib.GID{0xfe, 0x80, 15: 0x0c}
	guidA = ib.GUID(0xaa)
	guidB = ib.GUID(0xbb)
)

// counting is randomness that people can follow: 1, 2, 3.
type counting struct{ n uint64 }

func (c *counting) Uint64() uint64 { c.n++; return c.n }

// private returns the private data of a UD QPN, as RFC 4755 section 6 has it.
func private(qpn byte) []byte { return []byte{0, 0, 0, qpn, 0, 0, 0xff, 0xf4} }

// TestScripts runs testdata/*.txt. Flush left goes in, indented comes out;
// -update rewrites what comes out. "+4s" lets time pass, "< REQ" is a MAD from
// B, anything else is the user. Notes are shown if they tell a drop or a decision.
//
// The transitions, and the script that shows each (every state also takes the
// user's Disconnect, and a MAD that it has no line for is a counted drop):
//
//	from          cause                      to            action                      script
//	-             Connect                    REQ_SENT      REQ                         active
//	-             Connect at MaxConns        -             Failed, Released            bounds
//	-             REQ                        REQ_RCVD      RequestReceived             passive
//	-             REQ that cannot be         -             REJ                         (TestReasons)
//	-             REQ over a rate            -             drop                        bounds
//	REQ_SENT      deadline                   REQ_SENT      REQ                         active
//	REQ_SENT      last deadline              REJECTED      REJ 4, Failed               active
//	REQ_SENT      MRA                        MRA_REQ_RCVD  wait longer                 mra
//	REQ_SENT *    REP                        REP_RCVD      ReplyReceived               active
//	REQ_SENT *    REP with a QP of another   REJECTED      REJ 10, DREQ without a QPN  stale
//	REQ_SENT *    REJ                        -             Failed, Released            active
//	REQ_SENT *    REJ 10                     TIMEWAIT      Failed                      stale
//	REQ_SENT *    Cancel                     REJECTED      Failed, silence             cancel
//	REP_RCVD *    Ready                      ESTABLISHED   RTU, Established            active
//	REP_RCVD      REP                        MRA_REP_SENT  MRA                         mra
//	REP_RCVD *    Reject                     REJECTED      REJ, Failed                 reject
//	REP_RCVD *    deadline                   REJECTED      REJ 4, Failed               mra
//	REP_RCVD *    REJ                        TIMEWAIT      Failed                      reject
//	REQ_RCVD *    Accept                     REP_SENT      REP                         passive
//	REQ_RCVD *    Reject                     REJECTED      REJ                         reject
//	REQ_RCVD      REQ, Defer                 MRA_REQ_SENT  MRA                         mra
//	REQ_RCVD *    deadline                   REJECTED      REJ 4, Failed               mra
//	REQ_RCVD *    REJ                        -             Failed                      reject
//	REQ_RCVD *    REQ with its QP            REJECTED      REJ 10 twice, Failed        stale
//	REP_SENT *    deadline                   REP_SENT      REP                         passive
//	REP_SENT *    last deadline              TIMEWAIT      REJ 4, Failed               passive
//	REP_SENT *    REQ                        same          REP                         duplicates
//	REP_SENT      MRA                        MRA_REP_RCVD  wait longer                 mra
//	REP_SENT *    RTU                        ESTABLISHED   Established                 passive
//	REP_SENT *    DataOnQP                   ESTABLISHED   Established                 passive
//	REP_SENT *    REJ                        TIMEWAIT      Failed                      reject
//	REP_SENT *    DREQ                       TIMEWAIT      DREP, Disconnected          teardown
//	ESTABLISHED   REP (active)               same          RTU                         duplicates
//	ESTABLISHED   RTU                        same          LateRTU, or nothing         passive
//	ESTABLISHED   Disconnect                 DREQ_SENT     DREQ                        teardown
//	ESTABLISHED   DREQ                       TIMEWAIT      DREP, Disconnected          teardown
//	ESTABLISHED   REJ                        TIMEWAIT      Disconnected                teardown
//	ESTABLISHED   REQ with its QP            same          REJ 10, DREQ without a QPN  stale
//	ESTABLISHED   DREP to that               TIMEWAIT      Disconnected                stale
//	DREQ_SENT     deadline                   DREQ_SENT     DREQ                        teardown
//	DREQ_SENT     last deadline              TIMEWAIT      Disconnected                teardown
//	DREQ_SENT     DREP, DREQ                 TIMEWAIT      Disconnected                teardown
//	TIMEWAIT      DREQ                       same          DREP                        teardown
//	TIMEWAIT      REQ                        same          REJ 10                      duplicates
//	TIMEWAIT      deadline                   -             Released                    teardown
//	REJECTED      REQ, REP                   same          the same REJ                duplicates
//	REJECTED      REJ (cancelled)            -             Released                    cancel
//	REJECTED      deadline                   -             Released                    cancel
//
// A star stands for the MRA state beside it too.
func TestScripts(t *testing.T) {
	script.Run(t, "testdata/*.txt", func(t *testing.T) script.Machine {
		s := &scene{t: t, now: time.Unix(1000, 0)}
		s.restart(args{})
		return s
	})
}

// scene is a script in progress. "restart k=v" begins with a new Manager.
type scene struct {
	t   *testing.T
	m   *Manager
	now time.Time
	out []string // of the line at hand
}

// said returns what came of a line.
func (s *scene) said() []string {
	out := s.out
	s.out = nil
	return out
}

type args map[string]string

func (a args) num(key string, def uint64) uint64 { return script.Hex(a, key, def) }

func (a args) dec(key string, def int) int { return script.Decimal(a, key, def) }

func (a args) gid(key string, def ib.GID) ib.GID {
	switch a[key] {
	case "A":
		return gidA
	case "B":
		return gidB
	case "C":
		return gidC
	}
	return def
}

func (a args) handle() Handle {
	v := a["h"]
	if n, ok := strings.CutPrefix(v, "in"); ok {
		h, _ := strconv.ParseUint(n, 10, 64)
		return incoming | Handle(h)
	}
	h, _ := strconv.ParseUint(v, 10, 64)
	return Handle(h)
}

func (a args) transport() ib.Transport {
	switch a["transport"] {
	case "uc":
		return ib.UC
	case "rd":
		return ib.RD
	}
	return ib.RC
}

func (s *scene) restart(a args) {
	s.m = New(Options{GID: gidA, CAGUID: guidA, Rand: &counting{}, MaxRetries: a.dec("retries", 2),
		MaxConns: a.dec("conns", 0), MaxHalfOpen: a.dec("halfopen", 0), REQsPerSecond: a.dec("reqs", 0),
		RepliesPerSecond: a.dec("replies", 0)})
	for _, f := range []serviceid.Form{serviceid.RFC, serviceid.Legacy} {
		s.step(Listen{ServiceID: serviceid.New(f, 0x0a), PrivateData: private(0x0a)})
	}
}

// Do does one thing.
func (s *scene) Do(line string) ([]string, error) {
	words := strings.Fields(line)
	receive := words[0] == "<"
	if receive {
		words = words[1:]
	}
	a := args(script.Args(words[1:]))
	if receive {
		s.step(RecvMAD{message(words[0], a)})
		return s.said(), nil
	}
	h := a.handle()
	switch words[0] {
	case "restart":
		s.restart(a)
	case "connect":
		s.step(Connect{Handle: h, Remote: a.gid("to", gidB), ServiceID: serviceid.New(serviceid.RFC, 0x0b),
			Transport: a.transport(), QPN: ib.QPN(a.num("qpn", 0xa1)), StartingPSN: 0x64, PathMTU: ib.MTU1024, SRQ: true,
			RetryCount: 7, RNRRetry: 7, MaxRetries: uint8(a.dec("retries", 0)), PrivateData: private(0x0a)})
	case "ready":
		s.step(Ready{h, private(0x0a)})
	case "accept":
		s.step(Accept{Handle: h, QPN: ib.QPN(a.num("qpn", 0xa2)), StartingPSN: 0x65, RNRRetry: 7, SRQ: true,
			PrivateData: private(0x0a)})
	case "reject":
		s.step(Reject{Handle: h, Reason: Reason(a.dec("reason", 28)), PrivateData: private(0x0a)})
	case "defer":
		s.step(Defer{h, ib.Timeout(a.dec("wait", 20)), private(0x0a)})
	case "cancel":
		s.step(Cancel{h})
	case "disconnect":
		s.step(Disconnect{Handle: h})
	case "data":
		s.step(DataOnQP{ib.QPN(a.num("qpn", 0))})
	case "conns":
		for _, c := range s.m.Conns() {
			s.out = append(s.out, fmt.Sprintf("%s %v qpn=%x remote=%x", name(c.Handle), c.State, uint32(c.LocalQPN),
				uint32(c.RemoteQPN)))
		}
	case "counters":
		s.m.Counters(func(name string, v uint64) {
			if v != 0 {
				s.out = append(s.out, fmt.Sprintf("%s %d", name, v))
			}
		})
	default:
		return nil, errors.New("unknown line")
	}
	return s.said(), nil
}

// Pass lets d go by, with a Wake at every deadline in it.
func (s *scene) Pass(d time.Duration) []string {
	start, end := s.now, s.now.Add(d)
	for {
		next := s.m.Deadline()
		if next.IsZero() || next.After(end) {
			break
		}
		s.now = next
		s.out = append(s.out, fmt.Sprintf("at +%v", s.now.Sub(start).Round(time.Millisecond)))
		s.step(Wake{})
		if next := s.m.Deadline(); !next.IsZero() && !next.After(s.now) {
			s.t.Fatalf("after a Wake the deadline is still %v", next)
		}
	}
	s.now = end
	return s.said()
}

func (s *scene) step(ev Event) {
	for _, a := range s.m.Step(nil, s.now, ev) {
		if line := say(a); line != "" {
			s.out = append(s.out, line)
		}
	}
}

func name(h Handle) string {
	if h.Incoming() {
		return fmt.Sprintf("in%d", h&^incoming)
	}
	return fmt.Sprint(uint64(h))
}

// private1 shows the UD QPN in private data, "-" if all is zero.
func private1(b []byte) string {
	if len(bytes.Trim(b, "\x00")) == 0 {
		return "-"
	}
	return fmt.Sprintf("%02x", b[3])
}

// say prints an action.
func say(a Action) string {
	switch a := a.(type) {
	case SendMAD:
		_, msg, err := mad.Parse(a.MAD.Data[:])
		if err != nil {
			return err.Error()
		}
		to := ""
		if a.MAD.Remote != gidB {
			to = fmt.Sprintf(" to=%v", a.MAD.Remote)
		}
		switch m := msg.(type) {
		case mad.REQ:
			return fmt.Sprintf("> REQ comm=%x qpn=%x psn=%x %v private=%s%s", uint32(m.LocalCommID), uint32(m.LocalQPN),
				uint32(m.StartingPSN), m.Transport, private1(m.PrivateData[:]), to)
		case mad.REP:
			return fmt.Sprintf("> REP comm=%x remote=%x qpn=%x psn=%x private=%s%s", uint32(m.LocalCommID),
				uint32(m.RemoteCommID), uint32(m.LocalQPN), uint32(m.StartingPSN), private1(m.PrivateData[:]), to)
		case mad.RTU:
			return fmt.Sprintf("> RTU comm=%x remote=%x private=%s%s", uint32(m.LocalCommID), uint32(m.RemoteCommID),
				private1(m.PrivateData[:]), to)
		case mad.MRA:
			return fmt.Sprintf("> MRA comm=%x remote=%x of=%v private=%s%s", uint32(m.LocalCommID),
				uint32(m.RemoteCommID), m.MessageMRAed, private1(m.PrivateData[:]), to)
		case mad.REJ:
			ari := ""
			if m.ARILength > 0 {
				ari = fmt.Sprintf(" ari=%x", m.ARI[:m.ARILength])
			}
			return fmt.Sprintf("> REJ comm=%x remote=%x of=%v reason=%d%s private=%s%s", uint32(m.LocalCommID),
				uint32(m.RemoteCommID), m.MessageRejected, m.Reason, ari, private1(m.PrivateData[:]), to)
		case mad.DREQ:
			return fmt.Sprintf("> DREQ comm=%x remote=%x qpn=%x private=%s%s", uint32(m.LocalCommID),
				uint32(m.RemoteCommID), uint32(m.RemoteQPN), private1(m.PrivateData[:]), to)
		case mad.DREP:
			return fmt.Sprintf("> DREP comm=%x remote=%x%s", uint32(m.LocalCommID), uint32(m.RemoteCommID), to)
		}
		return fmt.Sprintf("> %v%s", msg, to)
	case RequestReceived:
		return fmt.Sprintf("request h=%s service=%v %v remote_qpn=%x send_psn=%x private=%s", name(a.Handle),
			a.ServiceID, a.Transport, uint32(a.RemoteQPN), uint32(a.SendPSN), private1(a.PrivateData))
	case ReplyReceived:
		return fmt.Sprintf("reply h=%s remote_qpn=%x send_psn=%x recv_psn=%x private=%s", name(a.Handle),
			uint32(a.RemoteQPN), uint32(a.SendPSN), uint32(a.RecvPSN), private1(a.PrivateData))
	case Established:
		return fmt.Sprintf("up h=%s qpn=%x remote_qpn=%x active=%v by_data=%v rtu=%s", name(a.Handle),
			uint32(a.LocalQPN), uint32(a.RemoteQPN), a.Active, a.ByData, private1(a.RTUPrivateData))
	case LateRTU:
		return fmt.Sprintf("late RTU h=%s private=%s", name(a.Handle), private1(a.PrivateData))
	case Failed:
		return fmt.Sprintf("failed h=%s %v reason=%d private=%s", name(a.Handle), a.Cause, a.Reason, private1(a.PrivateData))
	case Disconnected:
		return fmt.Sprintf("down h=%s by %v reason=%d", name(a.Handle), a.By, a.Reason)
	case Released:
		return fmt.Sprintf("released h=%s qpn=%x", name(a.Handle), uint32(a.QPN))
	case Note:
		switch {
		case a.Drop != NotDropped:
			return strings.TrimSpace(fmt.Sprintf("dropped %s: %v %s", a.Message, a.Drop, a.Text))
		case a.Dir == Decided:
			return "because " + a.Text
		}
		return ""
	}
	return fmt.Sprintf("%T?", a)
}

// message makes a MAD from B to A; fields that a line does not name are those
// of an honest one.
func message(what string, a args) *verbs.MAD {
	local, remote := mad.CommID(a.num("comm", 0xb1)), mad.CommID(a.num("remote", 0))
	qpn := ib.QPN(a.num("qpn", 0xb2))
	src := a.gid("src", gidB)
	var data []byte
	if _, none := a["noprivate"]; !none {
		data = private(0x0b)
	}
	var msg mad.Message
	switch what {
	case "REQ":
		req := mad.REQ{LocalCommID: local,
			ServiceID:   serviceid.ID(a.num("service", uint64(serviceid.New(serviceid.RFC, 0x0a)))),
			LocalCAGUID: ib.GUID(a.num("guid", uint64(guidB))), LocalQPN: qpn, Transport: a.transport(),
			StartingPSN: 0xc8, LocalCMResponseTimeout: 17, RemoteCMResponseTimeout: 17, RetryCount: 7, RNRRetryCount: 6,
			PKey: ib.DefaultPKey, PathMTU: ib.MTU(a.num("mtu", 3)), MaxCMRetries: uint8(a.dec("retries", 2)), SRQ: true,
			Primary: mad.PathInfo{LocalGID: a.gid("local", src), RemoteGID: a.gid("to", gidA), LocalACKTimeout: 14,
				HopLimit: 64}}
		req.Alternate.LocalGID = a.gid("alternate", ib.GID{})
		copy(req.PrivateData[:], data)
		msg = req
	case "REP":
		rep := mad.REP{LocalCommID: local, RemoteCommID: remote, LocalQPN: qpn, StartingPSN: 0xc9, RNRRetryCount: 5,
			TargetACKDelay: 10, LocalCAGUID: ib.GUID(a.num("guid", uint64(guidB)))}
		copy(rep.PrivateData[:], data)
		msg = rep
	case "RTU":
		rtu := mad.RTU{LocalCommID: local, RemoteCommID: remote}
		copy(rtu.PrivateData[:], data)
		msg = rtu
	case "MRA":
		msg = mad.MRA{LocalCommID: local, RemoteCommID: remote, MessageMRAed: mad.MessageKind(a.num("of", 0)),
			ServiceTimeout: ib.Timeout(a.dec("wait", 20))}
	case "REJ":
		rej := mad.REJ{LocalCommID: mad.CommID(a.num("comm", 0)), RemoteCommID: remote,
			MessageRejected: mad.MessageKind(a.num("of", 0)), Reason: Reason(a.dec("reason", 28))}
		if g := a.num("ari", 0); g != 0 {
			rej.ARILength, rej.ARI[7] = 8, byte(g)
		}
		copy(rej.PrivateData[:], data)
		msg = rej
	case "DREQ":
		msg = mad.DREQ{LocalCommID: local, RemoteCommID: remote, RemoteQPN: qpn}
	case "DREP":
		msg = mad.DREP{LocalCommID: local, RemoteCommID: remote}
	case "LAP":
		msg = mad.LAP{LocalCommID: local, RemoteCommID: remote}
	case "APR":
		msg = mad.APR{LocalCommID: local, RemoteCommID: remote}
	case "SIDR_REQ":
		msg = mad.SIDRREQ{RequestID: local, ServiceID: serviceid.New(serviceid.RFC, 0x0a)}
	case "SIDR_REP":
		msg = mad.SIDRREP{RequestID: local}
	default:
		panic("unknown message " + what)
	}
	in := &verbs.MAD{Remote: src, Local: gidA, QPN: ib.QPNGSI, PKey: ib.DefaultPKey}
	msg.AppendBinary(in.Data[:0])
	for key, at := range map[string]int{"version": 2, "class": 1, "method": 3, "base": 0, "attr": 17} {
		in.Data[at] = byte(a.num(key, uint64(in.Data[at])))
	}
	return in
}
