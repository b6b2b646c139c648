// What a flight recorder writes: its JSON, and the file that it goes to.
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <system_error>

#include "cpu/clock.h"
#include "flight/flight_recorder.h"

namespace tritondt {
namespace {

constexpr int kVersion = 1;

// Length of the well-formed UTF-8 sequence at the start of `text`, 0 where there is none.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [text](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, and what lies beyond U+10FFFF.
  const bool is_overlong = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xF0 && byte(1) < 0x90);
  const bool is_outside = (first == 0xED && byte(1) > 0x9F) || (first == 0xF4 && byte(1) > 0x8F);
  return is_overlong || is_outside ? 0 : length;
}

// A JSON string; bytes that are no UTF-8 become U+FFFD.
void append_string(std::string* json, std::string_view text) {
  json->push_back('"');
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const char first = text[0];
    if (length == 0) {
      *json += "\\ufffd";
    } else if (first == '"' || first == '\\') {
      *json += {'\\', first};
    } else if (static_cast<unsigned char>(first) < 0x20) {
      char escaped[7];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(first));
      *json += escaped;
    } else {
      json->append(text.substr(0, length));
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  json->push_back('"');
}

void append_key(std::string* json, const char* key) {
  if (json->back() != '{') *json += ", ";
  *json += '"';
  *json += key;
  *json += "\": ";
}

template <typename Integer>
void append_integer(std::string* json, const char* key, Integer value) {
  append_key(json, key);
  *json += std::to_string(value);
}

void append_text(std::string* json, const char* key, const std::string* text) {
  append_key(json, key);
  if (text == nullptr) {
    *json += "null";
  } else {
    append_string(json, *text);
  }
}

void append_seconds(std::string* json, const char* key, bool is_known, double seconds) {
  append_key(json, key);
  if (!is_known) {
    *json += "null";
    return;
  }
  // In whole microseconds: printf's decimal point follows the process's locale.
  const auto us = static_cast<long long>(seconds * 1e6);
  char text[40];
  std::snprintf(text, sizeof(text), "%lld.%06lld", us / 1'000'000, us % 1'000'000);
  *json += text;
}

std::string iso_text(double seconds) {
  const auto us = static_cast<long long>(seconds * 1e6);
  const time_t whole = us / 1'000'000;
  tm parts = {};
  gmtime_r(&whole, &parts);
  char text[80];
  std::snprintf(text, sizeof(text), "%04d-%02d-%02dT%02d:%02d:%02d.%06lld+00:00",
                parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min,
                parts.tm_sec, us % 1'000'000);
  return text;
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

void append_entry(std::string* json, const FlightEntry& entry, const FlightRecorder& recorder) {
  const TextTable& texts = recorder.texts();
  const auto append_time = [&](const char* key, std::int64_t ns) {
    append_seconds(json, key, ns != 0, recorder.wall_seconds(ns));
  };
  *json += '{';
  append_integer(json, "number", entry.number);
  append_text(json, "communicator", texts.text(entry.communicator));
  append_integer(json, "sequence", entry.sequence);
  append_text(json, "operation", texts.text(entry.operation));
  append_integer(json, "fingerprint", entry.fingerprint);
  append_key(json, "state");
  append_string(json, kFlightStates[static_cast<std::size_t>(entry.state)]);
  append_text(json, "site", texts.text(entry.site));
  append_integer(json, "peer", entry.peer);
  append_time("issued_at", entry.issued_ns);
  append_time("started_at", entry.started_ns);
  append_time("ended_at", entry.ended_ns);
  append_text(json, "error", texts.text(entry.error));
  append_integer(json, "sent_bytes", entry.sent_bytes);
  append_integer(json, "received_bytes", entry.received_bytes);
  append_key(json, "steps");
  *json += '{';
  for (std::size_t i = 0; i < kNumSteps; ++i) {
    if (entry.step_ns[i] != 0) append_time(kStepKinds[i], entry.step_ns[i]);
  }
  *json += "}}";
}

[[noreturn]] void throw_errno(int error, const std::string& path) {
  throw std::system_error(error, std::generic_category(), path);
}

// A new file beside `path`, open for writing; -1 and errno where there can be none. Its name cannot
// be guessed, and what lies there already, a link of somebody else's too, is never opened.
int make_draft(const std::string& path, std::string* draft) {
  constexpr int kMaxDraws = 16;
  for (int i = 0; i < kMaxDraws; ++i) {
    std::uint64_t drawn = 0;
    if (getrandom(&drawn, sizeof(drawn), 0) != static_cast<ssize_t>(sizeof(drawn))) return -1;
    char suffix[32];
    std::snprintf(suffix, sizeof(suffix), ".draft-%016" PRIx64, drawn);
    *draft = path + suffix;
    const int file =
        open(draft->c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (file >= 0 || errno != EEXIST) return file;
  }
  return -1;
}

// What lies at `path`, where it is nothing that a record may replace; nullptr for a file, or
// nothing.
const char* obstacle_at(const std::string& path) {
  struct stat found = {};
  if (lstat(path.c_str(), &found) != 0 || S_ISREG(found.st_mode)) return nullptr;
  if (S_ISLNK(found.st_mode)) return "a link";
  if (S_ISFIFO(found.st_mode)) return "a FIFO";
  if (S_ISDIR(found.st_mode)) return "a folder";
  return S_ISSOCK(found.st_mode) ? "a socket" : "a device";
}

// A rename would take the place of anything but a folder.
void check_replaceable(const std::string& path) {
  const char* const obstacle = obstacle_at(path);
  if (obstacle != nullptr)
    throw_errno(EEXIST, path + " is " + obstacle + ", not a file to replace");
}

}  // namespace

std::string FlightRecorder::to_json(std::string_view reason) const {
  std::string json = "{";
  append_integer(&json, "version", kVersion);
  append_integer(&json, "rank", rank_);
  append_integer(&json, "world_size", world_size_);
  append_key(&json, "host");
  append_string(&json, host_name());
  append_integer(&json, "pid", getpid());
  // By the clock of the entries and read before them: what was issued later is not in the file.
  append_key(&json, "written_at");
  append_string(&json, iso_text(wall_seconds(monotonic_ns())));
  append_key(&json, "reason");
  append_string(&json, reason);
  const std::vector<FlightEntry> entries = last(capacity_);
  append_key(&json, "entries");
  json += '[';
  for (std::size_t i = 0; i < entries.size(); ++i) {
    json += i == 0 ? "\n" : ",\n";
    append_entry(&json, entries[i], *this);
  }
  json += "]}\n";
  return json;
}

void write_atomically(const std::string& path, std::string_view content) {
  check_replaceable(path);
  std::string draft;
  const int file = make_draft(path, &draft);
  if (file < 0) throw_errno(errno, path);
  int error = 0;
  while (error == 0 && !content.empty()) {
    const ssize_t written = write(file, content.data(), content.size());
    if (written >= 0) {
      content.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (close(file) != 0 && error == 0) error = errno;
  if (error == 0 && rename(draft.c_str(), path.c_str()) != 0) error = errno;
  if (error == 0) return;
  unlink(draft.c_str());
  throw_errno(error, path);
}

}  // namespace tritondt
