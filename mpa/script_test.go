package mpa

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/script"
)

// A scene is a script in progress. Flush left goes in:
//
//	initiator negotiate p2p ird=4      a new initiator, which starts; options as in scene.begin
//	responder ird=4 ord=4 rtr=write    a new responder, which starts
//	start                              the TCP connection is there, again
//	< MPA Request rev=2 enhanced ird=4 ord=8 p2p rtr=send+write
//	                                   a startup frame of the peer
//	< MPA Reply rev=1 followed=0102    one with more octets behind it
//	< 30 octets of MPA Reply rev=2     its first 30 octets
//	< octets 4d50                      any octets
//	< RTR write                        the peer's first FPDU, of that kind
//	< Send data=x, < Write data=x      another first FPDU; L=0 says that it is not the last of its message
//	< Terminate 2/0/7                  layer, type and code; without them it is empty
//	accept private=x ird=4             the user answers the request; depths replace those of the options
//	reject private=x minord=6
//	fail disk                          a local fault, and what it is
//	closed EOF                         TCP has ended, and why if that is known
//	wake                               a Wake that no deadline calls for
//	counters                           those that are not zero
//
// In a frame, p2p is flag A, and rtr= are the flags B (send), C (write) and D (read).
// "private=x*509" is 509 octets. "ULP" is 0x3FFF in IRD or ORD.
//
// Of a result the script shows what this end has now and, behind the semicolon, the
// enhanced data that the peer sent. "fenced" is a responder that may not send yet.
type scene struct {
	t   *testing.T
	m   scripted
	now time.Time
	out []string // of the line at hand
}

// scripted is an [Initiator] or a [Responder].
type scripted interface {
	machine
	Counters() *Counters
}

// playScript runs one script of testdata.
func playScript(t *testing.T, name string) {
	t.Helper()
	script.Run(t, "testdata/"+name+".txt", func(t *testing.T) script.Machine { return &scene{t: t, now: t0} })
}

// said returns what came of a line.
func (s *scene) said() []string {
	out := s.out
	s.out = nil
	return out
}

// Do carries out one line.
func (s *scene) Do(line string) ([]string, error) {
	verb, rest, _ := strings.Cut(line, " ")
	if verb == "initiator" || verb == "responder" {
		err := s.begin(verb == "initiator", words(rest))
		return s.said(), err
	}
	if s.m == nil {
		return nil, errors.New("there is no connection yet")
	}
	if verb == "counters" {
		s.m.Counters().Each(func(name string, n uint64) {
			if n != 0 {
				s.out = append(s.out, fmt.Sprintf("%s %d", name, n))
			}
		})
		return s.said(), nil
	}
	ev, err := event(verb, rest)
	if err == nil {
		s.step(ev)
	}
	return s.said(), err
}

// Pass lets d go by, with a Wake at every deadline in it.
func (s *scene) Pass(d time.Duration) []string {
	if s.m == nil {
		s.t.Fatal("there is no connection yet")
	}
	start, end := s.now, s.now.Add(d)
	for next := s.m.Deadline(); !next.IsZero() && !next.After(end); next = s.m.Deadline() {
		s.now = next
		s.out = append(s.out, fmt.Sprintf("at +%v", s.now.Sub(start)))
		s.step(Wake{})
		if s.m.Deadline().Equal(next) {
			s.t.Fatalf("after a Wake the deadline is still %v", next)
		}
	}
	s.now = end
	return s.said()
}

func (s *scene) step(ev Event) {
	for _, a := range s.m.Step(nil, s.now, ev) {
		s.out = append(s.out, s.say(a))
	}
}

// begin makes a machine and starts it.
func (s *scene) begin(initiator bool, a args) error {
	o := Options{Depths: a.depths(), Negotiate: a.has("negotiate"), PeerToPeer: a.has("p2p"), RTR: a.rtr(),
		Revision: uint8(a.dec("rev")), Fallback: a.has("fallback"), Markers: a.has("markers"), CRC: a.has("crc"),
		RTRTimeout: a.duration("rtrtimeout")}
	private := a.private()
	if err := a.all(); err != nil {
		return err
	}
	s.m = nil
	if initiator {
		m, err := NewInitiator(o, private)
		if err != nil {
			s.out = append(s.out, "refused: "+strings.TrimPrefix(err.Error(), "mpa: "))
			return nil
		}
		s.m = m
	} else {
		m, err := NewResponder(o)
		if err != nil {
			s.out = append(s.out, "refused: "+strings.TrimPrefix(err.Error(), "mpa: "))
			return nil
		}
		s.m = m
	}
	s.step(Start{})
	return nil
}

// event is what a line says.
func event(verb, rest string) (Event, error) {
	switch verb {
	case "<":
		return receive(rest)
	case "start":
		return Start{}, nil
	case "wake":
		return Wake{}, nil
	case "fail":
		return Fail{Detail: rest}, nil
	case "closed":
		if rest == "" {
			return PeerClosed{}, nil
		}
		return PeerClosed{Err: errors.New(rest)}, nil
	}
	a := words(rest)
	private, depths := a.private(), (*Depths)(nil)
	if len(a) > 0 {
		d := a.depths()
		depths = &d
	}
	switch verb {
	case "accept":
		return Accept{Private: private, Depths: depths}, a.all()
	case "reject":
		return Reject{Private: private, Depths: depths}, a.all()
	}
	return nil, errors.New("unknown line")
}

// receive is what the peer sends.
func receive(what string) (Event, error) {
	first := -1
	if n, frame, ok := strings.Cut(what, " octets of "); ok {
		var err error
		if first, err = strconv.Atoi(n); err != nil {
			return nil, err
		}
		what = frame
	}
	if kind, rest, _ := strings.Cut(what, " "); kind == "octets" {
		return Recv{unhex(rest)}, nil
	} else if kind != "MPA" {
		s, err := segment(kind, rest)
		return FPDU{s}, err
	}
	b, err := startupFrame(what)
	if err == nil && first >= 0 {
		b = b[:first]
	}
	return Recv{b}, err
}

// segment is the peer's first FPDU.
func segment(kind, rest string) (Segment, error) {
	switch kind {
	case "RTR":
		return rtrSegment(args{"rtr": rest}.rtr()), nil
	case "Terminate":
		if rest == "" {
			return Segment{Opcode: OpTerminate, Last: true}, nil
		}
		var layer, class, code Cause
		if _, err := fmt.Sscanf(rest, "%d/%d/%d", &layer, &class, &code); err != nil {
			return Segment{}, err
		}
		return terminateSegment(layer<<12 | class<<8 | code), nil
	case "Send", "Write":
		a := words(rest)
		s := Segment{Opcode: OpSend, Last: a.text("L") != "0", MSN: 1, Payload: []byte(a.text("data"))}
		if kind == "Write" {
			s.Opcode, s.MSN = OpWrite, 0
		}
		return s, a.all()
	}
	return Segment{}, fmt.Errorf("%q is no message", kind)
}

// bits are the flags of a startup frame, but for Res.
var bits = []struct {
	name string
	mask int
}{{"reject", 0x20}, {"enhanced", 0x10}, {"markers", 0x80}, {"crc", 0x40}}

// startupFrame puts the frame of a line together, octet by octet.
func startupFrame(line string) ([]byte, error) {
	what, reply := strings.CutPrefix(line, "MPA Reply")
	if !reply {
		var ok bool
		if what, ok = strings.CutPrefix(line, "MPA Request"); !ok {
			return nil, fmt.Errorf("%q is no frame", line)
		}
	}
	a := words(what)
	flags := 0
	for _, b := range bits {
		if a.has(b.name) {
			flags |= b.mask
		}
	}
	letters := ""
	if a.has("p2p") {
		letters = "A"
	}
	rtr := a.rtr()
	for i, letter := range "BCD" {
		if rtr&(1<<i) != 0 {
			letters += string(letter)
		}
	}
	behind := unhex(a.text("followed"))
	b := frameBy(reply, flags, a.dec("rev"), letters, int(a.depth("ird")), int(a.depth("ord")), string(a.private()))
	return append(b, behind...), a.all()
}

// frameText is the line that says what a startup frame has. A frame that no line says,
// such as one with a reserved bit, is shown as octets.
func frameText(b []byte) string {
	if len(b) < FrameHeaderLen || b[16]&bitS != 0 && len(b) < FrameHeaderLen+EnhancedLen {
		return fmt.Sprintf("octets %x", b)
	}
	w := frameOf(b)
	kind, private := "Request", b[FrameHeaderLen:]
	if b[9] == 'p' {
		kind = "Reply"
	}
	text := fmt.Sprintf("MPA %s rev=%d", kind, w.rev)
	for _, f := range bits {
		if int(b[16])&f.mask != 0 {
			text += " " + f.name
		}
	}
	if w.s {
		rtr, p2p := strings.CutPrefix(w.flags, "A")
		text += " " + enhancedText(Enhanced{PeerToPeer: p2p, RTR: setOf(rtr), IRD: Depth(w.ird), ORD: Depth(w.ord)})
		private = private[EnhancedLen:]
	}
	text += privateText(private)
	if again, err := startupFrame(text); err != nil || !bytes.Equal(again, b) {
		return fmt.Sprintf("octets %x", b)
	}
	return text
}

func enhancedText(e Enhanced) string {
	s := fmt.Sprintf("ird=%v ord=%v", e.IRD, e.ORD)
	if e.PeerToPeer {
		s += " p2p"
	}
	if e.RTR != 0 {
		s += " rtr=" + e.RTR.String()
	}
	return s
}

// privateText is private data, with a space before it.
func privateText(b []byte) string {
	switch n := len(b); {
	case n == 0:
		return ""
	case n > 32 && bytes.Count(b, b[:1]) == n:
		return fmt.Sprintf(" private=%c*%d", b[0], n)
	}
	return fmt.Sprintf(" private=%s", b)
}

// say prints an action.
func (s *scene) say(a Action) string {
	switch a := a.(type) {
	case Write:
		return "> " + frameText(a.Data)
	case Request:
		s := fmt.Sprintf("request rev=%d", a.Rev)
		if a.Enhanced {
			s += " enhanced " + enhancedText(a.Peer)
		}
		return s + flagText(flag{a.Markers, "markers"}, flag{a.CRC, "crc"}) + privateText(a.Private)
	case SendRTR:
		return fmt.Sprintf("> RTR %v", a.Type)
	case SendTerminate:
		return fmt.Sprintf("> Terminate %v", a.Code.Cause())
	case Accepted:
		return "accepted" + s.fence() + resultText(a.Result)
	case Established:
		return "established" + s.fence() + resultText(a.Result)
	case Rejected:
		return "rejected" + resultText(a.Result)
	case Stream:
		return fmt.Sprintf("stream %x", a.Data)
	case Failed:
		return "failed " + strings.TrimPrefix(a.Err.Error(), "mpa: ")
	case Close:
		return "close"
	case Redial:
		return "redial"
	}
	return fmt.Sprintf("%T?", a)
}

// fence says whether a responder may send nothing yet.
func (s *scene) fence() string {
	if r, ok := s.m.(*Responder); ok && r.Fenced() {
		return " fenced"
	}
	return ""
}

// resultText is what was settled.
func resultText(r Result) string {
	s := fmt.Sprintf(" rev=%d %s", r.Rev, enhancedText(Enhanced{r.PeerToPeer, r.RTR, r.IRD, r.ORD}))
	s += flagText(flag{r.SendMarkers, "send_markers"}, flag{r.RecvMarkers, "recv_markers"}, flag{r.CRC, "crc"},
		flag{r.Fallback, "fallback"}) + privateText(r.Private)
	if r.Enhanced {
		s += "; peer " + enhancedText(r.Peer)
	}
	return s
}

// A flag is shown by its name if it is set.
type flag struct {
	set  bool
	name string
}

func flagText(flags ...flag) (s string) {
	for _, f := range flags {
		if f.set {
			s += " " + f.name
		}
	}
	return s
}

// args are the words of a line, "ird=4" and "p2p". What is read is taken out.
type args map[string]string

func words(s string) args { return script.Args(strings.Fields(s)) }

// all says which word was not read.
func (a args) all() error {
	for k := range a {
		return fmt.Errorf("unknown word %q", k)
	}
	return nil
}

func (a args) has(key string) bool {
	_, ok := a[key]
	delete(a, key)
	return ok
}

func (a args) text(key string) string {
	v := a[key]
	delete(a, key)
	return v
}

func (a args) dec(key string) int {
	defer delete(a, key)
	return script.Decimal(a, key, 0)
}

func (a args) depth(key string) Depth {
	if a[key] == "ULP" {
		delete(a, key)
		return DepthULP
	}
	return Depth(a.dec(key))
}

func (a args) depths() Depths {
	return Depths{IRD: a.depth("ird"), ORD: a.depth("ord"), MaxIRD: a.depth("maxird"), MinORD: a.depth("minord")}
}

func (a args) duration(key string) time.Duration {
	defer delete(a, key)
	return script.Duration(a, key)
}

// rtr is a set of kinds of RTR indication; "none" is for options.
func (a args) rtr() (set RTRTypes) {
	if _, ok := a["rtr"]; !ok {
		return 0
	}
	for name := range strings.SplitSeq(a.text("rtr"), "+") {
		k, ok := map[string]RTRTypes{"send": RTRSend, "write": RTRWrite, "read": RTRRead, "none": RTRNone}[name]
		if !ok {
			panic(fmt.Sprintf("%q is no kind of RTR indication", name))
		}
		set |= k
	}
	return set
}

// private is private data: "x*509" is so many octets.
func (a args) private() []byte {
	v := a.text("private")
	if c, count, ok := strings.Cut(v, "*"); ok {
		n, err := strconv.Atoi(count)
		if err != nil {
			panic(err)
		}
		return bytes.Repeat([]byte(c), n)
	}
	return []byte(v)
}
