// Package lru has a list of values in the order of their use. The links are in the values, so that a list
// costs no memory of its own and a value is removed without a search.
//
// It is no cache: the owner of a list says which values are forgotten, and when.
package lru

// Links are embedded in each value of a List. A value is in one list at a time.
type Links[T any] struct{ older, newer *T }

func (l *Links[T]) links() *Links[T] { return l }

// Newer returns the next newer value of the list, nil if this one was used last.
func (l *Links[T]) Newer() *T { return l.newer }

// A value is a pointer to a type with embedded Links.
type value[T any] interface {
	*T
	links() *Links[T]
}

// A List has values in the order of their use. The zero value is empty.
type List[T any, P value[T]] struct {
	oldest, newest *T
	n              int
}

// Oldest returns the value that was used longest ago, nil if there is none.
func (l *List[T, P]) Oldest() *T { return l.oldest }

// Len returns the number of values.
func (l *List[T, P]) Len() int { return l.n }

// Values returns the values, the one that was used longest ago first.
func (l *List[T, P]) Values() []*T {
	all := make([]*T, 0, l.n)
	for v := l.oldest; v != nil; v = P(v).links().newer {
		all = append(all, v)
	}
	return all
}

// Push adds v, which must be in no list, as the value that was used last.
func (l *List[T, P]) Push(v *T) {
	*P(v).links() = Links[T]{older: l.newest}
	if l.newest == nil {
		l.oldest = v
	} else {
		P(l.newest).links().newer = v
	}
	l.newest = v
	l.n++
}

// Remove removes v from l. v must be in l.
func (l *List[T, P]) Remove(v *T) {
	k := P(v).links()
	if k.older == nil {
		l.oldest = k.newer
	} else {
		P(k.older).links().newer = k.newer
	}
	if k.newer == nil {
		l.newest = k.older
	} else {
		P(k.newer).links().older = k.older
	}
	*k = Links[T]{}
	l.n--
}
