package rpcrdma

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/script"
)

// A scene is a script in progress: one end, whose peer is the script. Flush left goes in:
//
//	client ask=8            a client that is not connected yet; options as in scene.options
//	client up               one that has settled the version by a NULL call, in version two or
//	                        with up=1 in version one; the peer granted 32 credits, or granted=8
//	server up               the same of a server, whose client is ready for calls
//	connect peer=8192/2048  the connection is there. The private data of the peer says its Send Size
//	                        and its Receive Size, and with peer=4096/4096/R the R bit; peer=none sends none
//	call 1 size=100         the user calls: an RPC call of so many octets, 40 without arguments.
//	                        reduce=44+100 are items of it, max=9000 bounds the reply, results=3000,5000
//	                        its items; with type=2a info=616263 an RDMA2_OPTIONAL
//	cancel 1                the user has no more interest in the call
//	reply 1 size=24         the program answers; 24 is a reply without results. reduce as in call
//	cannot 1 need=9024      the program has not run: its reply would need so much
//	read 1                  an RDMA READ is done; size, rpc and payload say what it has brought
//	read 1 fails
//	grant 3                 the program takes three calls at a time
//	ready                   the program of the client expects calls
//	registered 9            memory 9 is there, whether somebody waits for it or not
//	cut                     the connection breaks, or with own this end has ended it
//	deadline, info          when the machine wants to be woken, and what holds
//
// and messages of the peer, where credits is 32 and the XID 1 unless the line says so:
//
//	< RDMA2_MSG xid=1 credits=4 dir=REPLY read=0=a:64 write=a:100+b:50 reply=c:9000 inv=a
//	< RDMA2_OPTIONAL type=2a info=616263 payload=0000000100000001
//	< RDMA2_ERROR RDMA2_ERR_CANT_REPLY processed index=1 needed=9000
//	< RDMA_ERROR ERR_VERS low=1 high=1
//	< 00000001 00000002 00000020 00000003
//
// Octets are given as words. A name stands for its version, RDMA2 or RDMA; vers=3 replaces it. dir is
// REPLY to a client and CALL to a server. Behind a MSG stands an RPC message of that direction and that
// XID: size is its length, rpc=CALL its msg_type, rpcxid its XID, payload other octets and rpc=none
// nothing. cut=30 cuts the message. invalidated=a says that the Send has invalidated that handle.
//
// A segment is handle:length, at the offset handle<<12, or handle:length@offset. XIDs, handles and
// offsets are hexadecimal.
//
// Memory is registered at once, and the first region has handle 101. It may be invalidated unless the
// options say fixed, and has segments of segment octets.
type scene struct {
	t          *testing.T
	c          *Conn
	now        time.Time
	out        []string
	cache      VersionCache
	segment    int
	fixed      bool
	nextHandle uint32
	writable   [][]byte // memory that the peer may write
}

// playScripts runs the scripts of testdata that pattern matches.
func playScripts(t *testing.T, pattern string) {
	t.Helper()
	script.Run(t, "testdata/"+pattern+".txt", func(t *testing.T) script.Machine { return &scene{t: t, now: t0} })
}

var errLine = errors.New("unknown line")

// lineArgs are the options of a line: "size=100" and "silent".
type lineArgs map[string]string

func (a lineArgs) dec(key string, def int) int { return script.Decimal(a, key, def) }

func (a lineArgs) hex(key string, def uint32) uint32 { return uint32(script.Hex(a, key, uint64(def))) }

func (a lineArgs) has(key string) bool { _, ok := a[key]; return ok }

func (a lineArgs) text(key, def string) string { return script.Text(a, key, def) }

// hexes are numbers with commas between them.
func (a lineArgs) hexes(key string) (all []uint32) {
	for _, w := range fields(a[key], ",") {
		n, err := strconv.ParseUint(w, 16, 32)
		if err != nil {
			panic(err)
		}
		all = append(all, uint32(n))
	}
	return all
}

func (a lineArgs) duration(key string) time.Duration { return script.Duration(a, key) }

// fields splits s, which has none if it is empty.
func fields(s, sep string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, sep)
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		panic(err)
	}
	return n
}

// Do carries out one line.
func (s *scene) Do(line string) ([]string, error) {
	f := strings.Fields(line)
	a := lineArgs(script.Args(f[1:]))
	var err error
	switch {
	case f[0] == "client" || f[0] == "server":
		err = s.begin(f[0] == "client", a)
	case s.c == nil:
		err = errors.New("there is no end")
	case f[0] == "<":
		s.step(Recv{Data: s.message(f[1:], a), WithInv: a.has("invalidated"), Invalidated: a.hex("invalidated", 0)})
	default:
		err = s.command(f, a)
	}
	return s.said(), err
}

// Pass lets time pass, with a Wake at every deadline.
func (s *scene) Pass(d time.Duration) []string {
	start, end := s.now, s.now.Add(d)
	for {
		next := s.c.Deadline()
		if next.IsZero() || next.After(end) {
			break
		}
		s.now = next
		s.out = append(s.out, fmt.Sprintf("at +%v", s.now.Sub(start)))
		s.step(Wake{})
		if next := s.c.Deadline(); !next.IsZero() && !next.After(s.now) {
			s.t.Fatalf("after a Wake the deadline is still %v", next)
		}
	}
	s.now = end
	return s.said()
}

func (s *scene) said() []string {
	out := s.out
	s.out = nil
	return out
}

// options are those of a new end.
func (s *scene) options(client bool, a lineArgs) Options {
	o := Options{Client: client, Start: Version(a.dec("start", 0)), Program: uint32(a.dec("program", 0)), ProgVersion: 4,
		SendSize: a.dec("send", 0), RecvSize: a.dec("recv", 0), Silent: a.has("silent"), RecvInv: a.has("recvinv"),
		SendInv: a.has("sendinv"), Ask: a.dec("ask", 0), Grant: a.dec("grant", 0),
		BackwardChunks: a.has("chunks"), OptTypes: a.hexes("types"), TailTypes: a.hexes("tails"),
		MaxCalls: a.dec("calls", 0), CallTimeout: a.duration("timeout"), XID: 1}
	low, high, ok := strings.Cut(a.text("versions", "0"), "-")
	if !ok {
		high = low
	}
	o.MinVersion, o.MaxVersion = Version(number(low)), Version(number(high))
	if a.has("nocalls") {
		o.Grant = -1
	}
	if a.has("noretries") {
		o.MaxRetries = -1
	}
	return o
}

// begin makes a new end.
func (s *scene) begin(client bool, a lineArgs) (err error) {
	s.segment, s.fixed = a.dec("segment", 0), a.has("fixed")
	s.nextHandle, s.writable = 0x100, nil
	o := s.options(client, a)
	if a.has("cached") {
		o.Start = s.cache.Start("peer", s.now)
	}
	if a.has("up") {
		return s.up(o, a)
	}
	s.c, err = NewConn(o)
	return err
}

// up makes an end that has settled the version by a NULL call. The user's calls begin at XID 1.
func (s *scene) up(o Options, a lineArgs) (err error) {
	version, name := o.maxVersion(), "RDMA2_MSG"
	if a["up"] == "1" {
		version = Version1
	}
	if version == Version1 {
		name = "RDMA_MSG"
	}
	refused := o.Client && o.start() != version
	if o.Client {
		o.Program, o.XID = 100003, 0
		if refused {
			o.XID--
		}
	}
	if s.c, err = NewConn(o); err != nil {
		return err
	}
	s.step(Connected{peerPrivate(a)})
	lines := []string{fmt.Sprintf("< %s xid=0 credits=%s", name, a.text("granted", "32"))}
	if refused {
		lines = slices.Insert(lines, 0, "< RDMA2_ERROR xid=ffffffff RDMA2_ERR_VERS low=1 high=1")
	}
	if !o.Client {
		lines = append(lines, "reply 1", "ready")
	}
	for _, l := range lines {
		if _, err := s.Do(l); err != nil {
			return err
		}
	}
	s.out = nil
	if i := s.c.Info(); !i.Settled || i.Version != version {
		return fmt.Errorf("it is not up: %+v", i)
	}
	return nil
}

// peerPrivate is the private data of the peer, with that of a consumer before it.
func peerPrivate(a lineArgs) []byte {
	b := []byte{1, 2, 3}
	f := strings.Split(a.text("peer", "4096/4096"), "/")
	if f[0] == "none" {
		return b
	}
	p := PrivateData{SendSize: number(f[0]), RecvSize: number(f[1]), RemoteInv: len(f) > 2}
	b, err := p.AppendBinary(b)
	if err != nil {
		panic(err)
	}
	return b
}

func (s *scene) command(f []string, a lineArgs) error {
	id := func() uint64 { return uint64(number(f[1])) }
	switch f[0] {
	case "connect":
		s.step(Connected{peerPrivate(a)})
	case "call":
		s.step(s.call(id(), a))
	case "cancel":
		s.step(Cancel{id()})
	case "reply":
		s.step(Answer{ID: id(), Payload: rpcMessage(a, DirReply, 0), Reduce: spans(a), OptInfo: octets(a["info"])})
	case "cannot":
		s.step(CannotAnswer{id(), a.dec("need", 0)})
	case "read":
		ev := ReadDone{Read: ReadID(id())}
		if a.has("fails") {
			ev.Err = errors.New("no access")
		} else {
			ev.Data = rpcMessage(a, DirCall, 1)
		}
		s.step(ev)
	case "registered":
		s.step(Registered{Reg: RegID(id()), Buf: []byte{1}})
	case "grant":
		s.step(SetGrant{int(id())})
	case "ready":
		s.step(PeerReady{})
	case "cut":
		s.step(Disconnected{Own: a.has("own")})
	case "deadline":
		d := "none"
		if next := s.c.Deadline(); !next.IsZero() {
			d = fmt.Sprintf("in %v", next.Sub(s.now))
		}
		s.out = append(s.out, d)
	case "info":
		i := s.c.Info()
		s.out = append(s.out, fmt.Sprintf("version=%d settled=%v asked=%d granted=%d", i.Version, i.Settled, i.Asked,
			i.Granted))
	default:
		return errLine
	}
	return nil
}

// call makes a call of the user's.
func (s *scene) call(id uint64, a lineArgs) Submit {
	ev := Submit{ID: id, MaxReply: a.dec("max", 0), Reduce: spans(a), Timeout: a.duration("timeout")}
	for _, w := range fields(a["results"], ",") {
		ev.Results = append(ev.Results, number(w))
	}
	if a.has("type") {
		ev.Option = &Option{a.hex("type", 0), octets(a["info"])}
		if !a.has("rpc") && !a.has("size") && !a.has("payload") {
			return ev
		}
	}
	ev.Payload = rpcMessage(a, DirCall, 0)
	return ev
}

// spans are the items of a payload: offset+length, with commas between them.
func spans(a lineArgs) (all []Span) {
	for _, w := range fields(a["reduce"], ",") {
		at, n, _ := strings.Cut(w, "+")
		all = append(all, Span{number(at), number(n)})
	}
	return all
}

// rpcMessage makes the RPC message of a line.
func rpcMessage(a lineArgs, dir Direction, xid uint32) []byte {
	if a.has("payload") {
		return octets(a["payload"])
	}
	xid = a.hex("rpcxid", xid)
	var b []byte
	switch a.text("rpc", dir.String()) {
	case "none":
		return nil
	case "CALL":
		b = (&RPCCall{XID: XID(xid), Prog: 100003, Vers: 4}).Append(nil)
	case "REPLY":
		b = (&RPCReply{XID: XID(xid)}).Append(nil)
	default:
		panic(errLine)
	}
	n := a.dec("size", len(b))
	return fill(b, n)[:n]
}

// fill makes a head an RPC message of n octets. Each octet behind the head is the low byte of its offset.
func fill(b []byte, n int) []byte {
	for i := len(b); i < n; i++ {
		b = append(b, byte(i))
	}
	return b
}

var messageNames = map[string]Proc{"MSG": ProcMSG, "NOMSG": ProcNOMSG, "MSGP": ProcMSGP, "DONE": ProcDONE,
	"ERROR": ProcERROR, "OPTIONAL": ProcOPTIONAL}

var errorNames = map[string]ErrCode{"ERR_VERS": ErrVers, "ERR_CHUNK": ErrChunk, "RDMA2_ERR_VERS": ErrVers,
	"RDMA2_ERR_BAD_XDR": ErrBadXDR, "RDMA2_ERR_CANT_REPLY": ErrCantReply, "RDMA2_ERR_INVAL_PROC": ErrInvalProc,
	"RDMA2_ERR_INVAL_OPTION": ErrInvalOption}

// message makes a message of the peer's.
func (s *scene) message(f []string, a lineArgs) []byte {
	prefix, name, _ := strings.Cut(f[0], "_")
	proc, ok := messageNames[name]
	if !ok {
		return octets(strings.Join(f, ""))
	}
	xid := a.hex("xid", 1)
	h := Header{XID: XID(xid), Vers: Version2, Credit: uint32(a.dec("credits", 32)), Proc: proc, InvHandle: a.hex("inv", 0)}
	if prefix == "RDMA" {
		h.Vers = Version1
	}
	h.Vers = Version(a.dec("vers", int(h.Vers)))
	dir := DirCall
	if s.c.opts.Client && a["dir"] != "CALL" || a["dir"] == "REPLY" {
		dir = DirReply
	}
	if h.Vers == Version2 {
		h.Direction = dir
	}
	for _, w := range fields(a["read"], ",") {
		at, segs, _ := strings.Cut(w, "=")
		for _, g := range chunk(segs) {
			h.Reads = append(h.Reads, ReadSegment{uint32(number(at)), g})
		}
	}
	for _, w := range fields(a["write"], ",") {
		h.Writes = append(h.Writes, chunk(w))
	}
	if a.has("reply") {
		h.Reply = chunk(a["reply"])
	}
	var payload []byte
	switch proc {
	case ProcERROR:
		h.Error = TransportError{Code: errorCode(f), Low: Version(a.dec("low", 0)), High: Version(a.dec("high", 0)),
			Processed: a.has("processed"), SegmentIndex: uint32(a.dec("index", 0)), LengthNeeded: uint32(a.dec("needed", 0))}
		payload = octets(a["payload"])
	case ProcOPTIONAL:
		h.OptType, h.OptInfo = a.hex("type", 0), octets(a["info"])
		payload = octets(a["payload"])
		if a.has("rpc") || a.has("size") {
			payload = rpcMessage(a, dir, xid)
		}
	case ProcMSG:
		payload = rpcMessage(a, dir, xid)
	default:
		payload = octets(a["payload"])
		for _, buf := range s.writable { // as the peer has written it
			copy(buf, fill(rpcMessage(a, dir, xid), len(buf)))
		}
	}
	b, err := h.AppendBinary(nil)
	if err != nil {
		panic(err)
	}
	b = append(b, payload...)
	return b[:a.dec("cut", len(b))]
}

// errorCode finds the error code of a line.
func errorCode(f []string) ErrCode {
	for _, w := range f {
		if code, ok := errorNames[w]; ok {
			return code
		}
	}
	panic("an error without its code")
}

// chunk reads segments with a plus between them.
func chunk(s string) Chunk {
	c := Chunk{}
	for _, w := range fields(s, "+") {
		var g Segment
		if n, _ := fmt.Sscanf(w, "%x:%d@%x", &g.Handle, &g.Length, &g.Offset); n == 2 {
			g.Offset = uint64(g.Handle) << 12
		} else if n != 3 {
			panic(fmt.Errorf("%q is no segment", w))
		}
		c = append(c, g)
	}
	return c
}

// step gives the machine an event, and tells what came of it: actions, and what was counted or granted.
func (s *scene) step(ev Event) {
	before, granted := *s.c.Counters(), s.c.Info().Granted
	events := []Event{ev}
	for len(events) > 0 {
		acts := s.c.Step(nil, s.now, events[0])
		events = events[1:]
		for _, a := range acts {
			s.out = append(s.out, s.say(a))
			switch a := a.(type) {
			case Register:
				events = append(events, s.register(a))
			case Learned:
				s.cache.Learn("peer", s.now, a)
			}
		}
	}
	for r, n := range s.c.Counters() {
		if n > before[r] {
			times := ""
			if n > before[r]+1 {
				times = fmt.Sprintf(" %d times", n-before[r])
			}
			s.out = append(s.out, fmt.Sprintf("counted %v%s", Reason(r), times))
		}
	}
	if n := s.c.Info().Granted; n != granted {
		s.out = append(s.out, fmt.Sprintf("granted %d", n))
	}
}

// register answers a Register.
func (s *scene) register(a Register) Registered {
	ev := Registered{Reg: a.Reg, Buf: make([]byte, a.Len), Invalidatable: !s.fixed}
	copy(ev.Buf, a.Data)
	if a.Data == nil {
		s.writable = append(s.writable, ev.Buf)
	}
	size := a.Len
	if s.segment > 0 {
		size = s.segment
	}
	for at := 0; at < a.Len; at += size {
		s.nextHandle++
		ev.Segments = append(ev.Segments, Segment{s.nextHandle, uint32(min(size, a.Len-at)), uint64(s.nextHandle) << 12})
	}
	return ev
}

// say prints an action.
func (s *scene) say(a Action) string {
	switch a := a.(type) {
	case Send:
		inv := ""
		if a.WithInv {
			inv = fmt.Sprintf(" invalidates=%x", a.Invalidate)
		}
		return "> " + sayMessage(a.Data) + inv
	case Register:
		use := "write"
		if a.Data != nil {
			use = "read"
		}
		return fmt.Sprintf("register %d for the peer to %s %d octets", a.Reg, use, a.Len)
	case Release:
		if a.Invalidated != 0 {
			return fmt.Sprintf("release %d, invalidated=%x", a.Reg, a.Invalidated)
		}
		return fmt.Sprintf("release %d", a.Reg)
	case Read:
		return fmt.Sprintf("READ %d %s", a.Read, sayChunk(a.Segments))
	case Write:
		return fmt.Sprintf("WRITE %s", sayChunk(a.Segments))
	case Serve:
		return fmt.Sprintf("serve %d%s max=%d%s%s", a.ID, sayRPC(a.Payload, nil), a.MaxReply, sayLengths(a.Results),
			sayOption(a.Option))
	case Done:
		if a.Err != nil {
			return fmt.Sprintf("done %d failed: %v%s", a.ID, a.Err.Reason, sayError(s.c.version, a.Transport))
		}
		var lengths []int
		for _, r := range a.Results {
			lengths = append(lengths, len(r))
		}
		return fmt.Sprintf("done %d%s%s%s", a.ID, sayRPC(a.Payload, nil), sayLengths(lengths), sayOption(a.Option))
	case Ready:
		i := a.Info
		b := fmt.Sprintf("ready version=%d send=%d recv=%d", i.Version, i.SendInline, i.RecvInline)
		if i.Refused != 0 {
			b += fmt.Sprintf(" refused=%d", i.Refused)
		}
		if i.RemoteInv {
			b += " invalidation"
		}
		if i.PeerAt < 0 {
			return b + " peer=none"
		}
		return b + fmt.Sprintf(" peer@%d", i.PeerAt)
	case Learned:
		if a.Assumed {
			return fmt.Sprintf("learned version=%d, assumed", a.Version)
		}
		return fmt.Sprintf("learned version=%d", a.Version)
	case Close:
		return fmt.Sprintf("close %v", a.Err.Reason)
	}
	return fmt.Sprintf("%T?", a)
}

// sayMessage prints a message as the lines of input have it.
func sayMessage(data []byte) string {
	h, payload, err := ParseHeader(data)
	if err != nil && h.Proc != ProcERROR {
		return err.Error()
	}
	prefix := "RDMA2_"
	if h.Vers == Version1 {
		prefix = "RDMA_"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s%v xid=%x credits=%d", prefix, h.Proc, uint32(h.XID), h.Credit)
	if h.Vers > Version2 || h.Vers == 0 {
		fmt.Fprintf(&b, " vers=%d", h.Vers)
	}
	if h.Proc == ProcERROR {
		return b.String() + sayError(h.Vers, h.Error)
	}
	if h.Vers == Version2 {
		fmt.Fprintf(&b, " dir=%v", h.Direction)
	}
	if h.Proc == ProcOPTIONAL {
		b.WriteString(sayOption(&Option{h.OptType, h.OptInfo}))
	}
	for i, r := range h.Reads {
		switch {
		case i == 0:
			fmt.Fprintf(&b, " read=%d=", r.Position)
		case r.Position == h.Reads[i-1].Position:
			b.WriteString("+")
		default:
			fmt.Fprintf(&b, ",%d=", r.Position)
		}
		b.WriteString(sayChunk(Chunk{r.Segment}))
	}
	for i, c := range h.Writes {
		b.WriteString([]string{" write=", ","}[min(i, 1)] + sayChunk(c))
	}
	if h.Reply != nil {
		fmt.Fprintf(&b, " reply=%s", sayChunk(h.Reply))
	}
	if h.InvHandle != 0 {
		fmt.Fprintf(&b, " inv=%x", h.InvHandle)
	}
	b.WriteString(sayRPC(payload, &h.XID))
	fmt.Fprintf(&b, " octets=%d", len(data))
	return b.String()
}

func sayError(v Version, e TransportError) string {
	switch {
	case e == TransportError{}:
		return ""
	case v != Version2 && e.Code == ErrChunk:
		return " ERR_CHUNK"
	case v != Version2 && e.Code == ErrVers:
		return fmt.Sprintf(" ERR_VERS low=%d high=%d", e.Low, e.High)
	}
	b := fmt.Sprintf(" RDMA2_ERR_%v", e.Code)
	switch e.Code {
	case ErrVers:
		b += fmt.Sprintf(" low=%d high=%d", e.Low, e.High)
	case ErrCantReply:
		if e.Processed {
			b += " processed"
		}
		b += fmt.Sprintf(" index=%d needed=%d", e.SegmentIndex, e.LengthNeeded)
	}
	return b
}

// sayRPC prints an RPC message: its msg_type and its length, its XID if that is not xid, and whether
// arguments or results are not those of fill.
func sayRPC(b []byte, xid *XID) string {
	if len(b) == 0 {
		return ""
	}
	x, dir, ok := payloadHead(b)
	if !ok {
		return fmt.Sprintf(" payload=%x", b)
	}
	out := fmt.Sprintf(" rpc=%v size=%d", dir, len(b))
	if xid != nil && x != *xid {
		out += fmt.Sprintf(" rpcxid=%x", uint32(x))
	}
	head := min(len(b), map[Direction]int{DirCall: 40, DirReply: 24}[dir])
	if !bytes.Equal(b, fill(slices.Clone(b[:head]), len(b))) {
		out += " changed"
	}
	return out
}

func sayOption(o *Option) string {
	if o == nil {
		return ""
	}
	return fmt.Sprintf(" type=%x info=%x", o.Type, o.Info)
}

func sayLengths(n []int) string {
	if len(n) == 0 {
		return ""
	}
	return " results=" + strings.ReplaceAll(strings.Trim(fmt.Sprint(n), "[]"), " ", ",")
}

func sayChunk(c Chunk) string {
	var b []string
	for _, g := range c {
		at := ""
		if g.Offset != uint64(g.Handle)<<12 {
			at = fmt.Sprintf("@%x", g.Offset)
		}
		b = append(b, fmt.Sprintf("%x:%d%s", g.Handle, g.Length, at))
	}
	return strings.Join(b, "+")
}
