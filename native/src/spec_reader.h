// Reads the structs of `spec.h` from Python dicts.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <initializer_list>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "spec.h"

namespace twostroke {

class SpecReader {
 public:
  // `path` names the dict in messages: "layers.3.attention.".
  SpecReader(nanobind::handle fields, std::string path) : fields_(as_dict(fields, path)), path_(std::move(path)) {}

  template <typename T>
  void operator()(const char* name, T& value) {
    read(field(name), path_ + name, value);
  }

  template <typename T>
  void operator()(const char* name, std::optional<T>& value) {
    seen_.insert(name);
    value.reset();
    if (!fields_.contains(name) || fields_[name].is_none()) return;
    read(fields_[name], path_ + name, value.emplace());
  }

  // None leaves the default.
  template <typename T>
  void or_none(const char* name, T& value) {
    const nanobind::object found = field(name);
    if (!found.is_none()) read(found, path_ + name, value);
  }

  template <typename Enum>
  void choice(const char* name, Enum& value, std::initializer_list<const char*> names) {
    const std::string found = cast<std::string>(field(name), path_ + name);
    value = static_cast<Enum>(index_of(found, names, path_ + name));
  }

  void unused(const char* name) { seen_.insert(name); }

  void require_all_read() const {
    for (const auto& [name, value] : fields_) {
      const std::string key = cast<std::string>(name, path_);
      if (seen_.count(key) == 0)
        throw std::invalid_argument("the native decoder does not know the field " + path_ + key);
    }
  }

 private:
  static nanobind::dict as_dict(nanobind::handle fields, const std::string& path) {
    if (nanobind::isinstance<nanobind::dict>(fields)) return nanobind::borrow<nanobind::dict>(fields);
    throw nanobind::type_error((path + " is not a dict").c_str());
  }

  template <typename T>
  static T cast(nanobind::handle value, const std::string& path) {
    try {
      return nanobind::cast<T>(value);
    } catch (const std::bad_cast&) {
      throw nanobind::type_error((path + " has a value of the wrong type").c_str());
    }
  }

  static int index_of(const std::string& name, std::initializer_list<const char*> names, const std::string& path) {
    int index = 0;
    for (const char* known : names) {
      if (name == known) return index;
      index++;
    }
    throw std::invalid_argument(path + " has an unknown value '" + name + "'");
  }

  nanobind::object field(const char* name) {
    seen_.insert(name);
    if (!fields_.contains(name)) throw std::invalid_argument("the specification has no field " + path_ + name);
    return nanobind::borrow(fields_[name]);
  }

  static void read(nanobind::handle value, const std::string& path, int& to) { to = cast<int>(value, path); }
  static void read(nanobind::handle value, const std::string& path, float& to) { to = cast<float>(value, path); }
  static void read(nanobind::handle value, const std::string& path, bool& to) { to = cast<bool>(value, path); }

  // A name, or the tuple (name, alpha, limit).
  static void read(nanobind::handle value, const std::string& path, Activation& to) {
    nanobind::object name = nanobind::borrow(value);
    if (nanobind::isinstance<nanobind::tuple>(value)) {
      const auto fields = nanobind::borrow<nanobind::tuple>(value);
      if (fields.size() != 3) throw nanobind::type_error((path + " is not (name, alpha, limit)").c_str());
      name = nanobind::borrow(fields[0]);
      read(fields[1], path, to.alpha);
      read(fields[2], path, to.limit);
    }
    to.kind = static_cast<ActivationKind>(index_of(cast<std::string>(name, path),
                                                   {"silu", "gelu_tanh", "gelu", "clamped_swiglu"}, path));
  }

  template <typename T>
  static void read(nanobind::handle value, const std::string& path, std::vector<T>& to) {
    int index = 0;
    for (nanobind::handle one : nanobind::borrow<nanobind::object>(value))
      read(one, path + "." + std::to_string(index++), to.emplace_back());
  }

  template <typename T>
  static void read(nanobind::handle value, const std::string& path, T& to) {
    SpecReader reader(value, path + ".");
    to.visit(reader);
    reader.require_all_read();
  }

  nanobind::dict fields_;
  std::string path_;
  std::set<std::string> seen_;
};

inline ModelSpec read_model_spec(nanobind::dict fields) {
  ModelSpec spec;
  SpecReader reader(fields, "");
  spec.visit(reader);
  reader.require_all_read();
  return spec;
}

}  // namespace twostroke
