package source

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"ipoibcm/membership"
)

// A Store keeps the last good list on disk, in two files that take turns. They are
// opened at the start, because the process gives up the right to open files later.
type Store struct {
	link       string
	files      [2]*os.File
	next       int
	generation uint32
}

// OpenStore opens the files of an interface in dir, and makes them if need be.
func OpenStore(dir, name, link string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, err
	}
	s := &Store{link: link}
	for i := range s.files {
		path := filepath.Join(dir, fmt.Sprintf("%s.members.%d", name, i))
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o640)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.files[i] = f
	}
	return s, nil
}

// Close closes the files.
func (s *Store) Close() (err error) {
	for _, f := range s.files {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	return err
}

// maxStored bounds what is read of a file, in octets.
const maxStored = 32 << 20

// Load returns the last list that was saved; ok is false if there is none.
func (s *Store) Load() (list membership.Snapshot, ok bool) {
	for i, f := range s.files {
		b, err := io.ReadAll(io.NewSectionReader(f, 0, maxStored))
		if err != nil {
			continue
		}
		got, generation, err := membership.ParseSaved(s.link, b)
		if err != nil || ok && int32(generation-s.generation) < 0 {
			continue
		}
		list, ok, s.generation, s.next = got, true, generation, 1-i
	}
	return list, ok
}

// Save writes a list over the older of the two files.
func (s *Store) Save(list membership.Snapshot) error {
	b, err := membership.AppendSaved(nil, s.link, s.generation+1, list)
	if err != nil {
		return err
	}
	f := s.files[s.next]
	if _, err := f.WriteAt(b, 0); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	s.generation++
	s.next = 1 - s.next
	return nil
}
