package mad_test

import (
	"testing"

	"ipoibcm/wire/mad"
)

// decoded reads in as one kind of message, nil if it is none.
func decoded[M mad.Message, P interface {
	*M
	UnmarshalBinary([]byte) error
}](t *testing.T, in []byte) mad.Message {
	var m, before M
	if err := P(&m).UnmarshalBinary(in); err == nil {
		return m
	}
	if any(m) != any(before) {
		t.Fatalf("%T: changed in spite of an error\n in %x", m, in)
	}
	return nil
}

// FuzzUnmarshal reads octets as every message there is. Each is read by its own
// kind exactly if Parse says so, and the same.
func FuzzUnmarshal(f *testing.F) {
	for _, b := range vectors(f) {
		f.Add(b)
		f.Add(b[:len(b)-1])
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		_, want, err := mad.Parse(in)
		found := false
		for _, m := range []mad.Message{
			decoded[mad.REQ](t, in), decoded[mad.MRA](t, in), decoded[mad.REJ](t, in), decoded[mad.REP](t, in),
			decoded[mad.RTU](t, in), decoded[mad.DREQ](t, in), decoded[mad.DREP](t, in), decoded[mad.SIDRREQ](t, in),
			decoded[mad.SIDRREP](t, in), decoded[mad.LAP](t, in), decoded[mad.APR](t, in), decoded[mad.ClassPortInfo](t, in),
		} {
			if m == nil {
				continue
			}
			found = true
			if err != nil || m != want {
				t.Fatalf("%T: %+v, but Parse gives %+v (%v)\n in %x", m, m, want, err, in)
			}
		}
		if !found && err == nil {
			t.Fatalf("%T: its own decoder refuses it\n in %x", want, in)
		}
	})
}
