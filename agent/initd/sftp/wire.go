package sftp

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Packet types, draft-ietf-secsh-filexfer-02 section 3.
const (
	typeInit     = 1
	typeVersion  = 2
	typeOpen     = 3
	typeClose    = 4
	typeRead     = 5
	typeWrite    = 6
	typeLstat    = 7
	typeFstat    = 8
	typeSetstat  = 9
	typeFsetstat = 10
	typeOpendir  = 11
	typeReaddir  = 12
	typeRemove   = 13
	typeMkdir    = 14
	typeRmdir    = 15
	typeRealpath = 16
	typeStat     = 17
	typeRename   = 18
	typeReadlink = 19
	typeSymlink  = 20
	typeStatus   = 101
	typeHandle   = 102
	typeData     = 103
	typeName     = 104
	typeAttrs    = 105
	typeExtended = 200
	typeExtReply = 201
)

// Status codes, section 7.
const (
	statusOK          = 0
	statusEOF         = 1
	statusNoSuchFile  = 2
	statusDenied      = 3
	statusFailure     = 4
	statusBadMessage  = 5
	statusUnsupported = 8
)

// Open flags, section 6.3, and attribute flags, section 5.
const (
	flagRead   = 0x01
	flagWrite  = 0x02
	flagAppend = 0x04
	flagCreate = 0x08
	flagTrunc  = 0x10
	flagExcl   = 0x20

	attrSize     = 0x01
	attrUIDGID   = 0x02
	attrMode     = 0x04
	attrTimes    = 0x08
	attrExtended = 0x80000000
)

var (
	errBadHandle   = errors.New("no such handle")
	errManyHandles = errors.New("too many open handles: close some first")
	errUnsupported = errors.New("operation unsupported")
)

// attrs are the attributes a client sets; flags says which of them are given. Times are Unix seconds.
type attrs struct {
	flags        uint32
	size         uint64
	uid, gid     uint32
	mode         uint32
	atime, mtime uint32
}

// reader takes fields off a request; after the first one that is not there, bad is true and all others are zero.
type reader struct {
	rest []byte
	bad  bool
}

func (r *reader) take(n int) []byte {
	if r.bad || n < 0 || n > len(r.rest) {
		r.bad = true
		return nil
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

func (r *reader) uint32() uint32 {
	if b := r.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (r *reader) uint64() uint64 {
	if b := r.take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

func (r *reader) bytes() []byte { return r.take(int(r.uint32())) }

func (r *reader) string() string { return string(r.bytes()) }

func (r *reader) attrs() attrs {
	a := attrs{flags: r.uint32()}
	if a.flags&attrSize != 0 {
		a.size = r.uint64()
	}
	if a.flags&attrUIDGID != 0 {
		a.uid, a.gid = r.uint32(), r.uint32()
	}
	if a.flags&attrMode != 0 {
		a.mode = r.uint32()
	}
	if a.flags&attrTimes != 0 {
		a.atime, a.mtime = r.uint32(), r.uint32()
	}
	if a.flags&attrExtended != 0 {
		for n := r.uint32(); n > 0 && !r.bad; n-- {
			r.bytes()
			r.bytes()
		}
	}
	return a
}

func appendString(b []byte, s string) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(len(s)))
	return append(b, s...)
}

func appendAttrs(b []byte, st *unix.Stat_t) []byte {
	b = binary.BigEndian.AppendUint32(b, attrSize|attrUIDGID|attrMode|attrTimes)
	b = binary.BigEndian.AppendUint64(b, uint64(st.Size))
	b = binary.BigEndian.AppendUint32(b, st.Uid)
	b = binary.BigEndian.AppendUint32(b, st.Gid)
	b = binary.BigEndian.AppendUint32(b, st.Mode)
	b = binary.BigEndian.AppendUint32(b, uint32(st.Atim.Sec))
	return binary.BigEndian.AppendUint32(b, uint32(st.Mtim.Sec))
}

// statusOf gives the code and text a client is told for err.
func statusOf(err error) (uint32, string) {
	var no syscall.Errno
	switch {
	case errors.Is(err, io.EOF):
		return statusEOF, "end of file"
	case errors.Is(err, errUnsupported):
		return statusUnsupported, err.Error()
	case errors.Is(err, os.ErrNotExist):
		return statusNoSuchFile, "no such file or directory"
	case errors.Is(err, os.ErrPermission), errors.Is(err, syscall.EROFS):
		return statusDenied, err.Error()
	case errors.As(err, &no):
		return statusFailure, no.Error()
	default:
		return statusFailure, err.Error()
	}
}
