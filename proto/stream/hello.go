package stream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"
)

// Version is the newest hello version that this package writes. A reader takes
// any version from 1 on: fields that it does not know are skipped, so a newer
// writer may add fields, but never change the meaning of an old one.
const Version = 1

// MaxHello is the greatest length of an encoded hello in bytes, its header
// included.
const MaxHello = 4 << 10

// ErrBadHello says that the bytes at the start of a stream are no hello.
var ErrBadHello = errors.New("stream: malformed hello")

// Hello is the one message that opens every byte stream; after it both ways
// are plain bytes. It says where the stream goes, not who may go there: the
// gateway has decided that before it writes the hello.
type Hello struct {
	Version   uint32 // written as Version when 0
	Workspace string // workspace id
	Epoch     int64  // run of the workspace that is meant
	Kind      string // what is at the far end: "ssh", "app", "forward", ...
	Nonce     string // proves that the answerer was asked for this very stream
	ResumeID  string // names a stream that can be resumed; empty where it cannot
	Offset    int64  // bytes already received of a resumed stream
	User      string // id of the user the stream is for
	Target    string // what Kind needs to know more: an app's name, a port
}

// Wire form: 4 bytes magic, 4 bytes big-endian length of what follows, then
// the fields: each a uvarint tag, and a uvarint value (tags below tagString)
// or a uvarint length and that many bytes (tags from tagString on). Zero
// values are left out.
const (
	helloMagic  = "CRL\x01"
	helloHeader = len(helloMagic) + 4

	tagVersion = 1
	tagEpoch   = 2
	tagOffset  = 3

	tagString    = 16 // tags from here on carry a length and bytes
	tagWorkspace = 16
	tagKind      = 17
	tagNonce     = 18
	tagResumeID  = 19
	tagUser      = 20
	tagTarget    = 21
)

// WriteHello writes h in one Write. It refuses negative numbers, text that is
// not UTF-8 and a hello of more than MaxHello bytes, before anything is sent.
func WriteHello(w io.Writer, h Hello) error {
	b, err := appendHello(make([]byte, helloHeader, 256), h)
	if err != nil {
		return err
	}
	if _, err := w.Write(b); err != nil {
		return fmt.Errorf("write hello: %w", err)
	}
	return nil
}

// appendHello fills the header room at the start of b and appends the fields.
func appendHello(b []byte, h Hello) ([]byte, error) {
	if h.Version == 0 {
		h.Version = Version
	}
	if h.Epoch < 0 || h.Offset < 0 {
		return nil, fmt.Errorf("%w: negative epoch or offset", ErrBadHello)
	}
	for _, f := range h.numbers() {
		if *f.value != 0 {
			b = binary.AppendUvarint(b, f.tag)
			b = binary.AppendUvarint(b, uint64(*f.value))
		}
	}
	b = binary.AppendUvarint(b, tagVersion)
	b = binary.AppendUvarint(b, uint64(h.Version))
	for _, f := range h.strings() {
		if *f.value == "" {
			continue
		}
		if !utf8.ValidString(*f.value) {
			return nil, fmt.Errorf("%w: a field is not UTF-8", ErrBadHello)
		}
		b = binary.AppendUvarint(b, f.tag)
		b = binary.AppendUvarint(b, uint64(len(*f.value)))
		b = append(b, *f.value...)
	}
	if len(b) > MaxHello {
		return nil, fmt.Errorf("%w: %d bytes, at most %d", ErrBadHello, len(b), MaxHello)
	}
	copy(b, helloMagic)
	binary.BigEndian.PutUint32(b[len(helloMagic):], uint32(len(b)-helloHeader))
	return b, nil
}

// ReadHello reads exactly one hello from r and not a byte more. What is not a
// hello ends with ErrBadHello; a stream that ends before its first byte ends
// with io.EOF.
func ReadHello(r io.Reader) (Hello, error) {
	var head [helloHeader]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		if errors.Is(err, io.EOF) {
			return Hello{}, io.EOF
		}
		return Hello{}, fmt.Errorf("read hello: %w", err)
	}
	if string(head[:len(helloMagic)]) != helloMagic {
		return Hello{}, fmt.Errorf("%w: wrong magic", ErrBadHello)
	}
	n := binary.BigEndian.Uint32(head[len(helloMagic):])
	if n > uint32(MaxHello-helloHeader) {
		return Hello{}, fmt.Errorf("%w: length %d", ErrBadHello, n)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return Hello{}, fmt.Errorf("read hello: %w", err)
	}
	return parseHello(body)
}

func parseHello(body []byte) (Hello, error) {
	var h Hello
	var version int64
	numbers := append(h.numbers(), numberField{tagVersion, &version})
	seen := map[uint64]bool{}
	for len(body) > 0 {
		tag, value, rest, err := nextField(body)
		if err != nil {
			return Hello{}, err
		}
		body = rest
		if seen[tag] {
			return Hello{}, fmt.Errorf("%w: field %d stands twice", ErrBadHello, tag)
		}
		seen[tag] = true
		if err := setField(tag, value, numbers, h.strings()); err != nil {
			return Hello{}, err
		}
	}
	if version < 1 || version > 1<<31 {
		return Hello{}, fmt.Errorf("%w: version %d", ErrBadHello, version)
	}
	h.Version = uint32(version)
	return h, nil
}

// nextField splits the first field off b: value holds the number's own bytes,
// or the string's.
func nextField(b []byte) (tag uint64, value, rest []byte, err error) {
	tag, n := binary.Uvarint(b)
	if n <= 0 {
		return 0, nil, nil, fmt.Errorf("%w: bad tag", ErrBadHello)
	}
	b = b[n:]
	size, n := binary.Uvarint(b)
	if n <= 0 {
		return 0, nil, nil, fmt.Errorf("%w: bad field %d", ErrBadHello, tag)
	}
	if tag < tagString {
		return tag, b[:n], b[n:], nil
	}
	b = b[n:]
	if size > uint64(len(b)) {
		return 0, nil, nil, fmt.Errorf("%w: field %d is cut short", ErrBadHello, tag)
	}
	return tag, b[:size], b[size:], nil
}

func setField(tag uint64, value []byte, numbers []numberField, texts []stringField) error {
	for _, f := range numbers {
		if f.tag != tag {
			continue
		}
		n, _ := binary.Uvarint(value)
		if int64(n) < 0 {
			return fmt.Errorf("%w: field %d is too great", ErrBadHello, tag)
		}
		*f.value = int64(n)
		return nil
	}
	for _, f := range texts {
		if f.tag != tag {
			continue
		}
		if !utf8.Valid(value) {
			return fmt.Errorf("%w: field %d is not UTF-8", ErrBadHello, tag)
		}
		*f.value = string(value)
		return nil
	}
	return nil // a field of a later version
}

type numberField struct {
	tag   uint64
	value *int64
}

type stringField struct {
	tag   uint64
	value *string
}

func (h *Hello) numbers() []numberField {
	return []numberField{{tagEpoch, &h.Epoch}, {tagOffset, &h.Offset}}
}

func (h *Hello) strings() []stringField {
	return []stringField{
		{tagWorkspace, &h.Workspace},
		{tagKind, &h.Kind},
		{tagNonce, &h.Nonce},
		{tagResumeID, &h.ResumeID},
		{tagUser, &h.User},
		{tagTarget, &h.Target},
	}
}
