package explore

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/simsm"
	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/timerheap"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// Times beyond these make no difference within a search: nothing that is far
// away becomes due, and the longest that the rules look back is 30 s (a
// connection that no neighbour leads to).
const (
	far     = time.Minute
	longAgo = 31 * time.Second
)

// unprinted are fields that do not decide what a machine does next. Whatever is
// not named here is part of the state, new fields too.
var unprinted = map[string]string{
	"ipoib.Interface.opt":     "fixed",
	"ipoib.Interface.now":     "of the last Step",
	"ipoib.Interface.out":     "of the last Step",
	"ipoib.Interface.n":       "statistics",
	"ipoib.Interface.tells":   "of notes only",
	"ipoib.Interface.answers": "of status only",
	"ipoib.conns.lastID":      "numbers only",
	"ipoib.conns.lastHandle":  "numbers only",
	"ipoib.peers.timers":      "an index of the peers",
	"ipoib.peers.unused":      "an index of the peers",
	"ipoib.conns.up":          "a count of byID",
	"ipoib.peers.searches":    "a count of the peers",
	"ipoib.conns.ofHost":      "a count of byID",
	"ipoib.Interface.group":   "no part in connections; static here",
	"ipoib.conns.byHandle":    "an index of byID",
	"ipoib.conn.since":        "shown only",
	"ipoib.peer.diag":         "shown only",
	"ipoib.peer.touched":      "looked at after ten minutes",
	"ipoib.peer.at":           "found anew when it is due",
	"ipoib.peer.Slot":         "a place in timers",
	"ipoib.peer.listed":       "what unused says",
	"ipoib.peer.Links":        "a place in unused",
	"cm.Manager.opt":          "fixed",
	"cm.Manager.dst":          "of the last Step",
	"cm.Manager.now":          "of the last Step",
	"cm.Manager.rx":           "of the last Step",
	"cm.Manager.halfOpen":     "never full",
	"cm.conn.asked":           "never full",
	"cm.Manager.counts":       "statistics",
	"cm.Manager.lastIncoming": "numbers only",
	"cm.Manager.lastSeq":      "numbers only",
	"cm.Manager.leaving":      "a count of byHandle",
	"cm.Manager.byLocal":      "an index of byHandle",
	"cm.Manager.byQPN":        "an index of byHandle",
	"cm.Manager.timers":       "an index of the connections",
	"cm.Manager.reqs":         "limits are off",
	"cm.Manager.replies":      "limits are off",
	"cm.conn.since":           "shown only",
	"cm.conn.tid":             "peers do not look at it",
	"cm.conn.seq":             "numbers only",
	"neigh.Table.o":           "fixed",
	"neigh.Table.out":         "of the last Step",
	"neigh.Table.now":         "of the last Step",
	"neigh.Table.lru":         "never full",
	"neigh.Table.heard":       "never full",
	"neigh.entry.heard":       "never full",
	"neigh.Table.addrs":       "an index of own",
	"neigh.Table.timers":      "an index of the entries",
	"neigh.Table.limit":       "limits are off",
	"neigh.Table.n":           "statistics",
	"neigh.entry.since":       "shown only",
	"neigh.entry.confirmed":   "lasts longer than a search",
	"neigh.entry.used":        "lasts longer than a search",
	"neigh.entry.Links":       "a place in lru",
	"neigh.Table.base":        "what the instants count from",
	"neigh.timer.seq":         "numbers only",
	"mad.REQ.TransactionID":   "peers do not look at it",
	"mad.REP.TransactionID":   "",
	"mad.RTU.TransactionID":   "",
	"mad.REJ.TransactionID":   "",
	"mad.MRA.TransactionID":   "",
	"mad.DREQ.TransactionID":  "",
	"mad.DREP.TransactionID":  "",
}

// A printer writes a state so that two states print alike if the same can
// happen in both.
type printer struct {
	b    []byte
	now  time.Time
	base time.Time // of the instants in a neigh.Table
	raw  bool      // numbers as they are, for sorting
	seen map[unsafe.Pointer]int
	// Numbers drawn at random or counted up, by the order in which they are met.
	comm, qpn, psn, handle, conn, tid names
	writers                           writers
}

type names map[uint64]uint64

func (p *printer) name(n *names, v uint64) {
	switch {
	case v == 0 || p.raw:
	default:
		if *n == nil {
			*n = names{}
		}
		id, ok := (*n)[v]
		if !ok {
			id = uint64(len(*n)) + 1
			(*n)[v] = id
		}
		v = id
	}
	p.uint(v)
}

func (p *printer) uint(v uint64) {
	if p.raw {
		p.b = binary.BigEndian.AppendUint64(p.b, v) // in order
		return
	}
	p.b = binary.AppendUvarint(p.b, v)
}

func (p *printer) time(t time.Time) {
	if t.IsZero() {
		p.b = append(p.b, 0xff)
		return
	}
	d := max(-longAgo, min(t.Sub(p.now), far))
	p.b = binary.AppendVarint(p.b, d.Round(time.Millisecond).Milliseconds())
}

// machine prints one machine. Its handles are its own.
func (p *printer) machine(f *ipoib.Interface) {
	p.seen = map[unsafe.Pointer]int{}
	p.handle, p.conn = nil, nil
	p.writers.of(reflect.TypeFor[ipoib.Interface]())(p, unsafe.Pointer(f))
}

// message prints a MAD by its fields.
func (p *printer) message(data *[verbs.MADLen]byte) {
	_, msg, err := mad.Parse(data[:])
	if err != nil {
		p.b = append(p.b, 0)
		return
	}
	p.uint(uint64(msg.Attr()))
	v := reflect.New(reflect.TypeOf(msg))
	v.Elem().Set(reflect.ValueOf(msg))
	p.writers.of(v.Type().Elem())(p, v.UnsafePointer())
}

// A writer prints the value of one type at a place.
type writer func(*printer, unsafe.Pointer)

type writers map[reflect.Type]writer

func at[T any](x unsafe.Pointer) T { return *(*T)(x) }

// special are the types that are not printed by their parts.
var special map[reflect.Type]writer

// instants are nanoseconds since the base of the table that they stand in.
const instants = "neigh.instant"

// indexes are sets in an order, as trees, whose shape tells only in what order they grew.
const indexes = "fib.index["

func (ws writers) index(t reflect.Type) writer {
	return func(p *printer, x unsafe.Pointer) {
		items := reflect.NewAt(t, x).Elem().FieldByName("BTreeG").MethodByName("Items").Call(nil)[0]
		p.uint(uint64(items.Len()))
		for i := range items.Len() {
			ws.of(items.Type().Elem())(p, items.Index(i).Addr().UnsafePointer())
		}
	}
}

func (p *printer) instant(v int64) {
	if v == 0 {
		p.time(time.Time{})
		return
	}
	p.time(p.base.Add(time.Duration(v)))
}

func init() { special = specialTypes() } // it prints messages, which are printed by it

func specialTypes() map[reflect.Type]writer {
	return map[reflect.Type]writer{
		reflect.TypeFor[time.Time](): func(p *printer, x unsafe.Pointer) { p.time(at[time.Time](x)) },
		reflect.TypeFor[netip.Addr](): func(p *printer, x unsafe.Pointer) {
			a := at[netip.Addr](x)
			p.b = append(append(p.b, byte(a.BitLen())), a.AsSlice()...)
		},
		reflect.TypeFor[netip.Prefix](): func(p *printer, x unsafe.Pointer) {
			a := at[netip.Prefix](x)
			p.b = append(append(p.b, byte(a.Bits())), a.Addr().AsSlice()...)
		},
		reflect.TypeFor[mad.CommID]():   func(p *printer, x unsafe.Pointer) { p.name(&p.comm, uint64(at[mad.CommID](x))) },
		reflect.TypeFor[ib.PSN]():       func(p *printer, x unsafe.Pointer) { p.name(&p.psn, uint64(at[ib.PSN](x))) },
		reflect.TypeFor[cm.Handle]():    func(p *printer, x unsafe.Pointer) { p.name(&p.handle, uint64(at[cm.Handle](x))) },
		reflect.TypeFor[nexthop.Conn](): func(p *printer, x unsafe.Pointer) { p.name(&p.conn, uint64(at[nexthop.Conn](x))) },
		reflect.TypeFor[[256]byte]():    func(p *printer, x unsafe.Pointer) { p.message((*[256]byte)(x)) },
		reflect.TypeFor[[]byte]():       func(p *printer, x unsafe.Pointer) { p.octets(at[[]byte](x)) },
		reflect.TypeFor[string]():       func(p *printer, x unsafe.Pointer) { p.octets([]byte(at[string](x))) },
		reflect.TypeFor[bool]():         func(p *printer, x unsafe.Pointer) { p.b = append(p.b, at[byte](x)) },
		reflect.TypeFor[ib.QPN]():       func(p *printer, x unsafe.Pointer) { p.printQPN(at[ib.QPN](x)) },
		reflect.TypeFor[float64]():      func(p *printer, x unsafe.Pointer) { p.uint(math.Float64bits(at[float64](x))) },
		reflect.TypeFor[[92]byte]():     trimmed[[92]byte],
		reflect.TypeFor[[196]byte]():    trimmed[[196]byte],
		reflect.TypeFor[[224]byte]():    trimmed[[224]byte],
		reflect.TypeFor[[148]byte]():    trimmed[[148]byte],
		reflect.TypeFor[[222]byte]():    trimmed[[222]byte],
		reflect.TypeFor[[220]byte]():    trimmed[[220]byte],
		reflect.TypeFor[[72]byte]():     trimmed[[72]byte],
	}
}

// trimmed prints a field of private data without the zeros that fill it.
func trimmed[T any](p *printer, x unsafe.Pointer) {
	b := unsafe.Slice((*byte)(x), unsafe.Sizeof(at[T](x)))
	p.octets(bytes.TrimRight(b, "\x00"))
}

func (p *printer) octets(b []byte) {
	p.uint(uint64(len(b)))
	p.b = append(p.b, b...)
}

// printQPN names QPNs of connections; those of UD QPs are addresses.
func (p *printer) printQPN(q ib.QPN) {
	if q&connQPN != 0 && q < viewQPN {
		p.b = append(p.b, 1)
		p.name(&p.qpn, uint64(q))
		return
	}
	p.uint(uint64(q) << 1)
}

// of returns the writer of t, made when it is first asked for.
func (ws writers) of(t reflect.Type) writer {
	if w := ws[t]; w != nil {
		return w
	}
	if w := special[t]; w != nil {
		ws[t] = w
		return w
	}
	if strings.HasPrefix(t.String(), indexes) {
		ws[t] = ws.index(t)
		return ws[t]
	}
	if t.String() == instants {
		ws[t] = func(p *printer, x unsafe.Pointer) { p.instant(at[int64](x)) }
		return ws[t]
	}
	var w writer
	ws[t] = func(p *printer, x unsafe.Pointer) { w(p, x) } // while t is being made
	w = ws.make(t)
	ws[t] = w
	return w
}

func (ws writers) make(t reflect.Type) writer {
	switch t.Kind() {
	case reflect.Struct:
		return ws.structure(t)
	case reflect.Pointer:
		elem := ws.of(t.Elem())
		return func(p *printer, x unsafe.Pointer) {
			x = at[unsafe.Pointer](x)
			if x == nil {
				p.uint(0)
				return
			}
			if i, ok := p.seen[x]; ok {
				p.uint(uint64(i) + 2)
				return
			}
			p.seen[x] = len(p.seen)
			p.uint(1)
			elem(p, x)
		}
	case reflect.Slice:
		elem, size := ws.of(t.Elem()), t.Elem().Size()
		return func(p *printer, x unsafe.Pointer) {
			s := at[[]struct{}](x) // of the same shape, whatever is in it
			p.uint(uint64(len(s)))
			for i := range s {
				elem(p, unsafe.Add(unsafe.Pointer(unsafe.SliceData(s)), uintptr(i)*size))
			}
		}
	case reflect.Array:
		if t.Elem().Kind() == reflect.Uint8 {
			return func(p *printer, x unsafe.Pointer) {
				p.b = append(p.b, unsafe.Slice((*byte)(x), t.Len())...)
			}
		}
		elem, size := ws.of(t.Elem()), t.Elem().Size()
		return func(p *printer, x unsafe.Pointer) {
			for i := range t.Len() {
				elem(p, unsafe.Add(x, uintptr(i)*size))
			}
		}
	case reflect.Map:
		return ws.mapping(t)
	case reflect.Bool, reflect.Int8, reflect.Uint8:
		return func(p *printer, x unsafe.Pointer) { p.b = append(p.b, at[byte](x)) }
	case reflect.Int16, reflect.Uint16:
		return func(p *printer, x unsafe.Pointer) { p.uint(uint64(at[uint16](x))) }
	case reflect.Int32, reflect.Uint32:
		return func(p *printer, x unsafe.Pointer) { p.uint(uint64(at[uint32](x))) }
	case reflect.Int, reflect.Uint: // of 32 bits on some machines
		return func(p *printer, x unsafe.Pointer) { p.uint(uint64(at[uint](x))) }
	case reflect.Int64, reflect.Uint64:
		return func(p *printer, x unsafe.Pointer) { p.uint(at[uint64](x)) }
	case reflect.String:
		return special[reflect.TypeFor[string]()]
	case reflect.Interface:
		return ws.record(t)
	}
	return func(*printer, unsafe.Pointer) { panic(fmt.Sprintf("explore: no way to print a %v", t)) }
}

// deadlines are the fields with the deadlines of what stands in a [timerheap.Heap] while it
// waits: a stopped timer keeps the deadline that it had.
var deadlines = map[string]string{"cm.conn": "deadline", "neigh.timer": "at"}

// transactionID is the field that has that of a MAD of subnet administration.
const transactionID = "sa.Header.TransactionID"

func (ws writers) structure(t reflect.Type) writer {
	type part struct {
		offset uintptr
		w      writer
	}
	var parts []part
	timer, timed := deadlines[t.String()]
	for i := range t.NumField() {
		f := t.Field(i)
		if _, skip := unprinted[t.String()+"."+f.Name]; skip || timed && (f.Name == "Slot" || f.Name == timer) {
			continue
		}
		w := ws.of(f.Type)
		if t.String()+"."+f.Name == transactionID {
			w = func(p *printer, x unsafe.Pointer) { p.name(&p.tid, at[uint64](x)) }
		}
		parts = append(parts, part{f.Offset, w})
	}
	if timed {
		slot, _ := t.FieldByName("Slot")
		deadline, _ := t.FieldByName(timer)
		parts = append(parts, part{0, func(p *printer, x unsafe.Pointer) {
			if s := at[timerheap.Slot](unsafe.Add(x, slot.Offset)); !s.Armed() {
				p.time(time.Time{})
				return
			}
			ws.of(deadline.Type)(p, unsafe.Add(x, deadline.Offset))
		}})
	}
	base, based := t.FieldByName("base")
	based = based && t.String() == "neigh.Table"
	return func(p *printer, x unsafe.Pointer) {
		if based {
			p.base = at[time.Time](unsafe.Add(x, base.Offset))
		}
		for _, f := range parts {
			f.w(p, unsafe.Add(x, f.offset))
		}
	}
}

// mapping prints maps by their keys as they are, whose order is that of age.
func (ws writers) mapping(t reflect.Type) writer {
	key, elem := ws.of(t.Key()), ws.of(t.Elem())
	type entry struct {
		sort []byte
		k, v unsafe.Pointer
	}
	return func(p *printer, x unsafe.Pointer) {
		m := reflect.NewAt(t, x).Elem()
		p.uint(uint64(m.Len()))
		if m.Len() == 0 {
			return
		}
		entries := make([]entry, 0, m.Len())
		for it := m.MapRange(); it.Next(); {
			k, v := reflect.New(t.Key()), reflect.New(t.Elem())
			k.Elem().SetIterKey(it)
			v.Elem().SetIterValue(it)
			entries = append(entries, entry{ws.sortKey(key, k.UnsafePointer()), k.UnsafePointer(), v.UnsafePointer()})
		}
		slices.SortFunc(entries, func(a, b entry) int { return bytes.Compare(a.sort, b.sort) })
		for _, e := range entries {
			key(p, e.k)
			elem(p, e.v)
		}
	}
}

func (ws writers) sortKey(key writer, x unsafe.Pointer) []byte {
	p := printer{raw: true, writers: ws}
	key(&p, x)
	return p.b
}

// Every field that is not printed exists: one that moves elsewhere is printed there,
// which makes states differ that are alike.
func TestUnprinted(t *testing.T) {
	fields := map[string]bool{}
	var look func(reflect.Type)
	seen := map[reflect.Type]bool{}
	look = func(t reflect.Type) {
		if seen[t] {
			return
		}
		seen[t] = true
		switch t.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Array:
			look(t.Elem())
		case reflect.Map:
			look(t.Key())
			look(t.Elem())
		case reflect.Struct:
			for i := range t.NumField() {
				fields[t.String()+"."+t.Field(i).Name] = true
				look(t.Field(i).Type)
			}
		}
	}
	for _, v := range []any{ipoib.Interface{}, simsm.Subnet{}, mad.REQ{}, mad.REP{}, mad.RTU{}, mad.REJ{}, mad.MRA{}, mad.DREQ{},
		mad.DREP{}} {
		look(reflect.TypeOf(v))
	}
	for name := range unprinted {
		if !fields[name] {
			t.Errorf("%s is not printed, and is no field", name)
		}
	}
}
