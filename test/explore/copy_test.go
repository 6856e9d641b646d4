package explore

import (
	"log/slog"
	"net/netip"
	"reflect"
	"time"
	"unsafe"

	"ipoibcm/group"
)

// A machine is copied whole by walking its types: a Clone method in every room
// would have to follow every new field, and one forgotten would let two states
// share what they must not.

// shared are types that nobody changes once they are made.
var shared = map[reflect.Type]bool{
	reflect.TypeFor[time.Time]():    true,
	reflect.TypeFor[netip.Addr]():   true,
	reflect.TypeFor[netip.Prefix](): true,
	reflect.TypeFor[*slog.Logger](): true,
	reflect.TypeFor[*group.Table](): true,
	reflect.TypeFor[[]byte]():       true, // packets and private data
}

// A plan says how values of one type are copied.
type plan struct {
	typ    reflect.Type
	deep   bool // a plain copy is not enough
	fields []field
	elem   *plan // of pointer, slice, array, map
	key    *plan
	inside bool // pointers to it exist, so it may be pointed to inside another
}

type field struct {
	offset uintptr
	plan   *plan
}

// plans are those of all types met; complete before anything is copied.
type plans map[reflect.Type]*plan

func (ps plans) of(t reflect.Type) *plan {
	if p := ps[t]; p != nil {
		return p
	}
	p := &plan{typ: t}
	ps[t] = p
	if shared[t] {
		return p
	}
	switch t.Kind() {
	case reflect.Pointer:
		p.deep = true
		p.elem = ps.of(t.Elem())
		p.elem.inside = true
	case reflect.Slice:
		p.deep = true
		p.elem = ps.of(t.Elem())
	case reflect.Map:
		p.deep = true
		p.key, p.elem = ps.of(t.Key()), ps.of(t.Elem())
	case reflect.Interface:
		p.deep = true
	case reflect.Array:
		p.elem = ps.of(t.Elem())
		p.deep = p.elem.deep
	case reflect.Struct:
		for i := range t.NumField() {
			f := ps.of(t.Field(i).Type)
			p.deep = p.deep || f.deep
			p.fields = append(p.fields, field{t.Field(i).Offset, f})
		}
	}
	return p
}

// A copier copies one graph of objects.
type copier struct {
	plans plans
	done  map[object]unsafe.Pointer
}

// An object is told by its type as well as by where it is: the first field of
// a struct is at the same place.
type object struct {
	at  unsafe.Pointer
	typ *plan
}

// clone returns a deep copy of x. Types that hide behind interfaces are
// compiled when they are met, so a copier is not for two goroutines.
func clone[T any](ps plans, x *T) *T {
	c := &copier{ps, make(map[object]unsafe.Pointer, 64)}
	return (*T)(c.pointer(ps.of(reflect.TypeFor[T]()), unsafe.Pointer(x)))
}

func (c *copier) pointer(p *plan, src unsafe.Pointer) unsafe.Pointer {
	if d := c.done[object{src, p}]; d != nil {
		return d
	}
	n := reflect.New(p.typ)
	n.Elem().Set(reflect.NewAt(p.typ, src).Elem())
	dst := n.UnsafePointer()
	c.done[object{src, p}] = dst
	c.insides(p, dst, src)
	c.fix(p, dst, src)
	return dst
}

// insides makes known what pointers may point to in the middle of an object,
// before anything is followed: a list's elements lead to the list in its owner.
func (c *copier) insides(p *plan, dst, src unsafe.Pointer) {
	for _, f := range p.fields {
		d, s := unsafe.Add(dst, f.offset), unsafe.Add(src, f.offset)
		if f.plan.inside && f.plan.deep {
			c.done[object{s, f.plan}] = d
		}
		c.insides(f.plan, d, s)
	}
}

// fix replaces, in dst, which is a plain copy of src, what the two still share.
func (c *copier) fix(p *plan, dst, src unsafe.Pointer) {
	if !p.deep {
		return
	}
	switch p.typ.Kind() {
	case reflect.Struct:
		for _, f := range p.fields {
			c.fix(f.plan, unsafe.Add(dst, f.offset), unsafe.Add(src, f.offset))
		}
	case reflect.Pointer:
		if at := *(*unsafe.Pointer)(src); at != nil {
			*(*unsafe.Pointer)(dst) = c.pointer(p.elem, at)
		}
	case reflect.Array:
		for i := range p.typ.Len() {
			off := uintptr(i) * p.elem.typ.Size()
			c.fix(p.elem, unsafe.Add(dst, off), unsafe.Add(src, off))
		}
	case reflect.Slice:
		c.slice(p, dst, src)
	case reflect.Map:
		c.maps(p, dst, src)
	case reflect.Interface:
		d, s := reflect.NewAt(p.typ, dst).Elem(), reflect.NewAt(p.typ, src).Elem()
		if e := s.Elem(); e.IsValid() && e.Kind() == reflect.Pointer && !shared[e.Type()] {
			at := c.pointer(c.plans.of(e.Type()).elem, e.UnsafePointer())
			d.Set(reflect.NewAt(e.Type().Elem(), at))
		}
	}
}

func (c *copier) slice(p *plan, dst, src unsafe.Pointer) {
	s := reflect.NewAt(p.typ, src).Elem()
	if s.IsNil() {
		return
	}
	d := reflect.MakeSlice(p.typ, s.Len(), s.Len()) // no room behind it to share
	reflect.Copy(d, s)
	if p.elem.deep && s.Len() > 0 {
		to, from := d.UnsafePointer(), s.UnsafePointer()
		for i := range s.Len() {
			off := uintptr(i) * p.elem.typ.Size()
			c.fix(p.elem, unsafe.Add(to, off), unsafe.Add(from, off))
		}
	}
	reflect.NewAt(p.typ, dst).Elem().Set(d)
}

func (c *copier) maps(p *plan, dst, src unsafe.Pointer) {
	s := reflect.NewAt(p.typ, src).Elem()
	if s.IsNil() {
		return
	}
	d := reflect.MakeMapWithSize(p.typ, s.Len())
	if s.Len() > 0 {
		k, v := reflect.New(p.key.typ), reflect.New(p.elem.typ)
		for it := s.MapRange(); it.Next(); {
			k.Elem().SetIterKey(it)
			v.Elem().SetIterValue(it)
			if p.key.deep {
				c.fix(p.key, k.UnsafePointer(), k.UnsafePointer())
			}
			if p.elem.deep {
				c.fix(p.elem, v.UnsafePointer(), v.UnsafePointer())
			}
			d.SetMapIndex(k.Elem(), v.Elem())
		}
	}
	reflect.NewAt(p.typ, dst).Elem().Set(d)
}
