package membership

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"time"
)

// A saved list is the last good list on disk, for a start while its source does not answer. It is a header
// of 16 octets, and JSON. Two files take turns, so that a write that is cut short leaves the previous list.
//
//	octets  0-3   "IPML"
//	        4-7   CRC-32C of all that follows
//	        8-11  length of the JSON
//	        12-15 generation: of two good files the later one counts
const savedMagic = "IPML"

const (
	savedHeader = 16
	maxSaved    = 16 << 20 // octets
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A savedList is the JSON of a saved list of link Link.
type savedList struct {
	Version  int           `json:"v"`
	Link     string        `json:"link"`
	Source   string        `json:"source"`
	At       time.Time     `json:"at"`
	Revision uint64        `json:"revision,omitempty"`
	Members  []savedMember `json:"members"`
}

type savedMember struct {
	ID     string          `json:"id"`
	By     string          `json:"by,omitempty"`
	Record json.RawMessage `json:"record"`
}

// AppendSaved appends s, the list of link, to b in the format of the files on disk.
func AppendSaved(b []byte, link string, generation uint32, s Snapshot) ([]byte, error) {
	l := savedList{Version: RecordVersion, Link: link, Source: s.Source, At: s.At.UTC(), Revision: s.Revision,
		Members: []savedMember{}}
	for _, m := range s.Members {
		r, err := AppendRecord(nil, m)
		if err != nil {
			return b, err
		}
		l.Members = append(l.Members, savedMember{ID: m.ID, By: m.By, Record: r})
	}
	j, err := json.Marshal(l)
	if err != nil {
		return b, err
	}
	sealed := binary.BigEndian.AppendUint32(nil, uint32(len(j)))
	sealed = append(binary.BigEndian.AppendUint32(sealed, generation), j...)
	b = binary.BigEndian.AppendUint32(append(b, savedMagic...), crc32.Checksum(sealed, castagnoli))
	return append(b, sealed...), nil
}

// ParseSaved reads what AppendSaved wrote for link. It ignores octets behind that.
func ParseSaved(link string, b []byte) (s Snapshot, generation uint32, err error) {
	if len(b) < savedHeader || string(b[:4]) != savedMagic {
		return s, 0, errors.New("no saved list")
	}
	n := uint64(binary.BigEndian.Uint32(b[8:]))
	if n > maxSaved || n > uint64(len(b)-savedHeader) {
		return s, 0, errors.New("the saved list is cut short")
	}
	b = b[:savedHeader+n]
	if crc32.Checksum(b[8:], castagnoli) != binary.BigEndian.Uint32(b[4:]) {
		return s, 0, errors.New("the saved list was not written to its end")
	}
	var l savedList
	if err := json.Unmarshal(b[savedHeader:], &l); err != nil {
		return s, 0, fmt.Errorf("saved list: %w", err)
	}
	switch {
	case l.Version != RecordVersion:
		return s, 0, fmt.Errorf("saved list: version %d is not known here", l.Version)
	case l.Link != link:
		return s, 0, fmt.Errorf("the saved list is of link %q", l.Link)
	case len(l.Members) > MaxMembers:
		return s, 0, fmt.Errorf("saved list: %d members", len(l.Members))
	}
	s = Snapshot{Source: l.Source, At: l.At, Revision: l.Revision, Saved: true}
	for _, m := range l.Members {
		parsed, err := ParseRecord(m.ID, m.By, m.Record)
		if err != nil {
			return s, 0, fmt.Errorf("saved list: %s: %w", m.ID, err)
		}
		s.Members = append(s.Members, parsed)
	}
	return s, binary.BigEndian.Uint32(b[12:]), nil
}
