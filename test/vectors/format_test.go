package vectors

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
)

// A file is one file of docs/vectors; its README has the format.
type file struct {
	Title     string     `json:"title"`
	License   string     `json:"license"`
	Packets   []packet   `json:"packets"`
	Decisions []decision `json:"decisions"`

	samples []sample
}

// A packet is octets with their meaning.
type packet struct {
	Name   string  `json:"name"`
	Note   string  `json:"note,omitempty"`
	Sent   bool    `json:"sent"` // false: nobody should send it, everybody takes it
	Octets string  `json:"octets"`
	Fields []field `json:"fields"`
}

// A field is some bits of a packet. They follow each other without a gap.
type field struct {
	Octet  int    `json:"octet"`
	Bit    int    `json:"bit"` // 0 is the most significant
	Bits   int    `json:"bits"`
	Name   string `json:"name"`
	Hex    string `json:"hex"` // value, in as many digits as the bits need
	Clause string `json:"clause"`
}

// A decision is what follows from something by a rule.
type decision struct {
	Rule   string `json:"rule"`
	Name   string `json:"name"`
	Clause string `json:"clause"`
	Given  object `json:"given"`
	Want   object `json:"want"`

	decide func() object // by our code
}

type object = map[string]any

// A sample is a packet in the making, and what our codec makes of it.
type sample struct {
	name, note string
	fields     []field
	bits       []byte // one bit each

	encode func() ([]byte, error) // nil: we do not send it
	decode func([]byte) (any, error)
	want   any
}

// word appends a field of at most 64 bits.
func (s *sample) word(name string, bits int, value uint64, clause string) {
	if value>>(bits-1)>>1 != 0 {
		panic(fmt.Sprintf("%s: %#x has more than %d bits", name, value, bits))
	}
	s.add(name, bits, fmt.Sprintf("%0*x", (bits+3)/4, value), clause)
	for i := bits - 1; i >= 0; i-- {
		s.bits = append(s.bits, byte(value>>i)&1)
	}
}

// raw appends a field of whole octets.
func (s *sample) raw(name string, value []byte, clause string) {
	if len(value) == 0 {
		return
	}
	s.add(name, 8*len(value), hex.EncodeToString(value), clause)
	for _, v := range value {
		for i := 7; i >= 0; i-- {
			s.bits = append(s.bits, v>>i&1)
		}
	}
}

func (s *sample) add(name string, bits int, digits, clause string) {
	s.fields = append(s.fields, field{len(s.bits) / 8, len(s.bits) % 8, bits, name, digits, clause})
}

// octets packs the fields.
func (s *sample) octets() []byte {
	if len(s.bits)%8 != 0 {
		panic(fmt.Sprintf("%s has %d bits", s.name, len(s.bits)))
	}
	b := make([]byte, len(s.bits)/8)
	for i, bit := range s.bits {
		b[i/8] |= bit << (7 - i%8)
	}
	return b
}

// render returns the file, a field or a decision on each line.
func (f *file) render() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "{\n  \"title\": %s,\n  \"license\": \"Apache-2.0\",\n  \"packets\": [", text(f.Title))
	for i, s := range f.samples {
		separate(&b, i, "    ")
		fmt.Fprintf(&b, "{\"name\": %s,", text(s.name))
		if s.note != "" {
			fmt.Fprintf(&b, " \"note\": %s,", text(s.note))
		}
		fmt.Fprintf(&b, " \"sent\": %t,\n     \"octets\": \"%x\",\n     \"fields\": [", s.encode != nil, s.octets())
		for i, x := range s.fields {
			separate(&b, i, "       ")
			b.WriteString(text(x))
		}
		b.WriteString("]}")
	}
	b.WriteString("],\n  \"decisions\": [")
	for i, d := range f.Decisions {
		separate(&b, i, "    ")
		b.WriteString(text(d))
	}
	b.WriteString("]\n}\n")
	return b.Bytes()
}

func separate(b *bytes.Buffer, i int, indent string) {
	if i > 0 {
		b.WriteByte(',')
	}
	b.WriteString("\n" + indent)
}

// text returns v as JSON.
func text(v any) string {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic(err)
	}
	return string(bytes.TrimRight(b.Bytes(), "\n"))
}
