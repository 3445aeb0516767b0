package fleet

import (
	"errors"
	"fmt"
)

// Kind sorts errors by what the caller can do about them.
type Kind uint8

// The kinds. KindInternal is the zero value, so that an unclassified error is one of ours.
const (
	KindInternal Kind = iota
	KindInvalid
	KindUnauthenticated
	KindForbidden
	KindNotFound
	KindExists
	KindConflict
	KindExhausted
	KindUnavailable
)

var kindNames = [...]string{"internal", "invalid", "unauthenticated", "forbidden", "not_found", "exists", "conflict", "exhausted", "unavailable"}

// String returns the kind's stable word.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "internal"
}

// Error is an error that a user may see. Message says what to change; Cause is for the operator's log only.
type Error struct {
	Kind    Kind
	Message string
	Cause   error
}

// Error returns the message, and the cause when there is one.
func (e *Error) Error() string {
	if e.Cause == nil {
		return e.Message
	}
	if text := e.Cause.Error(); text != "" {
		return e.Message + ": " + text
	}
	return e.Message
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Errorf makes an error of a kind. A %w operand becomes the cause's chain, its text part of the message.
func Errorf(kind Kind, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	return &Error{Kind: kind, Message: err.Error(), Cause: hidden{errors.Unwrap(err)}.orNil()}
}

// Wrap gives a cause a kind and a message for the user; nil stays nil.
func Wrap(cause error, kind Kind, format string, args ...any) error {
	if cause == nil {
		return nil
	}
	return &Error{Kind: kind, Message: fmt.Sprintf(format, args...), Cause: cause}
}

// KindOf returns the kind of the outermost Error in err's chain, KindInternal when there is none.
func KindOf(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return KindInternal
}

// IsKind reports whether err is of a kind.
func IsKind(err error, kind Kind) bool { return err != nil && KindOf(err) == kind }

// UserMessage returns the text that a user may see: the message of the outermost Error, without causes.
func UserMessage(err error) string {
	var e *Error
	if errors.As(err, &e) {
		return e.Message
	}
	return "internal error; the gateway's log has the cause"
}

// hidden keeps a cause in the chain without repeating its text, which the message already holds.
type hidden struct{ error }

func (h hidden) orNil() error {
	if h.error == nil {
		return nil
	}
	return h
}

// Error is empty: the text stands in the message.
func (h hidden) Error() string { return "" }

// Unwrap returns the cause.
func (h hidden) Unwrap() error { return h.error }
